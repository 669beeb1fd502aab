"""The models of `hora bench train`, each with a batch of random data. Plain PyTorch: every contestant builds these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained: `batch(generator)` makes inputs and targets, `loss(outputs, targets)` is a mean over them."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch_size: int


def mlp() -> nn.Module:
    """784-4096-4096-10 with ReLU: 20.0 M parameters and little arithmetic for each, the hardest for communication."""
    return nn.Sequential(
        nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )  # fmt: skip


def cnn() -> nn.Module:
    """Three convolutions on 32 x 32 x 3: 0.3 M parameters and much arithmetic for each."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128 * 4 * 4, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip


class Block(nn.Module):
    """Causal self-attention, then a GELU MLP of four times the width; both after a LayerNorm and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """By default 6 layers, width 384, 6 heads, context 128, vocabulary 128: 10.8 M parameters."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6, context: int = 128, words: int = 128) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.token(codes) + self.position.weight[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def _images(
    shape: tuple[int, ...], num_classes: int = 10
) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    return lambda generator: (
        torch.randn(shape, generator=generator),
        torch.randint(num_classes, shape[:1], generator=generator),
    )


def _text(words: int = 128, context: int = 128) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(words, (8, context + 1), generator=generator)
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()

    return batch


def gpt34m() -> nn.Module:
    """8 layers, width 512, 8 heads, context 512, vocabulary 8,192: 33.9 M parameters; for GPUs."""
    return GPT(layers=8, width=512, heads=8, context=512, words=8192)


def gpt236m() -> nn.Module:
    """16 layers, width 1024, 16 heads, context 512, vocabulary 16,384: 235.6 M parameters; for GPUs."""
    return GPT(layers=16, width=1024, heads=16, context=512, words=16384)


def _loss_of_text(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


WORKLOADS = {
    "mlp": Workload(build=mlp, batch=_images((64, 784)), loss=F.cross_entropy, batch_size=64),
    "gpt": Workload(build=GPT, batch=_text(), loss=_loss_of_text, batch_size=8),
    "gpt34m": Workload(build=gpt34m, batch=_text(8192, 512), loss=_loss_of_text, batch_size=8),
    "gpt236m": Workload(build=gpt236m, batch=_text(16384, 512), loss=_loss_of_text, batch_size=8),
    "cnn": Workload(build=cnn, batch=_images((64, 3, 32, 32)), loss=F.cross_entropy, batch_size=64),
}
