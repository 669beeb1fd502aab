"""Training: from the user's untouched loop to the strategy at work."""

from __future__ import annotations

from .steps import as_list
from .training import Training

__all__ = ["Training", "as_list"]
