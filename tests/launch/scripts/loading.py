"""`loading.py HOW VICTIM`: ranks with two forked DataLoader workers each, who may not call init; then all wait for the
victim, which is killed or sleeps."""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import hora


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Refused(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 0:
            try:
                hora.init()
            except hora.HoraError as refusal:
                print(f"refused: {refusal}", flush=True)
        return index


if __name__ == "__main__":
    how, victim = sys.argv[1], int(sys.argv[2])
    job = hora.init()
    if how == "killed":
        list(DataLoader(Refused(), batch_size=8, num_workers=1, multiprocessing_context="fork"))
    loader = iter(DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", persistent_workers=True))
    next(loader)
    hora.barrier()
    print("ready", flush=True)
    if how == "killed" and job.rank == victim:
        time.sleep(0.2)
        print(f"at {time.monotonic()}: rank {victim} killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == victim:
        time.sleep(60)
    try:
        hora.all_reduce(torch.ones(1000))
    except hora.PeerLost as lost:
        print(f"at {time.monotonic()}: rank {job.rank} lost {list(lost.ranks)}: {lost}", flush=True)
