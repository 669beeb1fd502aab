"""A dataset that calls hora.init() in a DataLoader worker."""

import torch

import hora


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        hora.init()
        return torch.ones(2)


if __name__ == "__main__":
    job = hora.init()
    for _ in job.shard(Data(), batch_size=2, num_workers=1):
        pass
