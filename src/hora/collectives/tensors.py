"""Tensors in and out of collectives: as flat contiguous CPU vectors, back again, and what a transfer returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from ..transport import Transfer


class TransferHandle:
    """A point-to-point transfer in flight; `wait()` returns the tensor."""

    def __init__(self, transfer: Transfer, tensor: torch.Tensor, finish: Callable[[], None] | None) -> None:
        self._transfer = transfer
        self._tensor = tensor
        self._finish = finish

    @property
    def done(self) -> bool:
        return self._transfer.done

    def wait(self) -> torch.Tensor:
        self._transfer.wait()
        if self._finish:
            self._finish()
            self._finish = None
        return self._tensor


def mark_changed(tensor: torch.Tensor) -> None:
    """Data that arrives bypasses torch, and autograd must know that values changed."""
    if not tensor.is_inference():
        increment_version(tensor)


def flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The tensor as a flat CPU vector, and how to copy it back if that is not the tensor's own memory."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg():
        return (tensor if tensor.dim() == 1 else tensor.view(-1)), None
    _refuse_expanded(tensor)
    copy = tensor.to("cpu").resolve_neg().contiguous()

    def copy_back() -> None:
        tensor.copy_(copy)

    return copy.view(-1), copy_back


def in_place(tensor: torch.Tensor, work: Callable[[torch.Tensor], None], has_result: bool = True) -> torch.Tensor:
    """Runs `work` on the tensor as a flat CPU vector and brings the result back."""
    flat, copy_back = flatten(tensor)
    version = None if tensor.is_inference() else tensor._version
    work(flat)
    if copy_back and has_result:
        copy_back()
    if has_result and version is not None and tensor._version == version:
        mark_changed(tensor)
    return tensor


def on_device(tensor: torch.Tensor, work: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The same, but the flat vector stays on the tensor's device."""
    plain = tensor.detach()
    _refuse_expanded(plain)
    flat = plain.resolve_neg().contiguous().view(-1)
    work(flat)
    if flat.data_ptr() != plain.data_ptr():
        plain.copy_(flat.view(plain.shape))
    else:
        mark_changed(tensor)
    return tensor


def _refuse_expanded(tensor: torch.Tensor) -> None:
    if 0 in tensor.stride() and tensor.numel() > 1:
        raise ValueError("tensor is expanded (stride 0), so its elements share memory; call .clone() first")


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").resolve_neg().contiguous()


def to_device(parts: list[torch.Tensor] | None, device: torch.device) -> list[torch.Tensor] | None:
    return None if parts is None else [part.to(device) for part in parts]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor, shape: Sequence[object] | None = None) -> str:
    """ "float32 [3, 4]"."""
    return f"{dtype_name(tensor.dtype)} [{', '.join(map(str, tensor.shape if shape is None else shape))}]"


def describe_rows(tensor: torch.Tensor) -> str:
    """ "float32 [any, 4]": the number of rows may differ between ranks."""
    return describe(tensor, ("any", *tensor.shape[1:]) if tensor.dim() else ())
