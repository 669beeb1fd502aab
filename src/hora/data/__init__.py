"""Data: who computes which samples."""

from .ledger import BatchSlice, Dealt, Leased, LeasedBlock, Ledger, LedgerView
from .loader import LoaderCallbacks, Shard, shard
from .service import DataService, LeaseClient

__all__ = [
    "BatchSlice",
    "DataService",
    "Dealt",
    "LeaseClient",
    "Leased",
    "LeasedBlock",
    "Ledger",
    "LedgerView",
    "LoaderCallbacks",
    "Shard",
    "shard",
]
