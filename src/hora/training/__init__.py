"""Training: from the user's untouched loop to the strategy at work."""

from __future__ import annotations

from .training import Training, several

__all__ = ["Training", "several"]
