"""Datasets: small real data that ships with the package, so that examples and the demo need no download."""

from __future__ import annotations

import gzip
import importlib.resources

import torch
from torch.utils.data import TensorDataset

NUM_DIGITS = 1797
NUM_TEST = 297
PIXEL_MAX = 16


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits as (train, test): 1,500 and 297 pairs of a float32 image [1, 8, 8] in 0..1 and an int64 label.

    The split is fixed: the last 297 of them are the test set.

    Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository,
    https://doi.org/10.24432/C50P49, CC BY 4.0; see ATTRIBUTION.md beside this file.
    """
    packed = importlib.resources.files(__package__).joinpath("digits.gz").read_bytes()
    raw = torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=torch.uint8)  # all labels, then all pixels
    labels = raw[:NUM_DIGITS].long()
    images = raw[NUM_DIGITS:].view(NUM_DIGITS, 1, 8, 8).float() / PIXEL_MAX
    cut = NUM_DIGITS - NUM_TEST
    return TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])
