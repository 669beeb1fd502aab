"""Data: who computes which samples."""

from .desk import Desk, Lender
from .ledger import Block, Dealt, Leased, Ledger, Portion, View
from .loader import Seat, Shard, shard

__all__ = ["Block", "Dealt", "Desk", "Leased", "Ledger", "Lender", "Portion", "Seat", "Shard", "View", "shard"]
