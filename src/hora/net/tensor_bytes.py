"""The bytes of a tensor, in place, as sockets take them."""

from __future__ import annotations

import ctypes

import torch


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place. The tensor must outlive the view."""
    length = tensor.numel() * tensor.element_size()
    if length == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")
