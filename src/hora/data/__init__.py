"""Data: who computes which samples."""

from .ledger import Dealt, Ledger, Portion, View
from .loader import Seat, Shard, shard

__all__ = ["Dealt", "Ledger", "Portion", "Seat", "Shard", "View", "shard"]
