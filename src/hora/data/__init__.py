"""Data: which worker computes which samples, and the loaders that read them."""

from .leased import Leased, LeasedBlock
from .ledger import BatchSlice, Dealt, LedgerView
from .loader import LoaderCallbacks, Shard
from .service import DataService
from .sharding import shard

__all__ = [
    "BatchSlice",
    "DataService",
    "Dealt",
    "Leased",
    "LeasedBlock",
    "LedgerView",
    "LoaderCallbacks",
    "Shard",
    "shard",
]
