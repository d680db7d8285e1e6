"""Stores: one block an expert on disk, read directly, cached in RAM. Importing this does not import torch."""

from nemolab.store.cache import ExpertCache
from nemolab.store.cachefolder import ensure_store
from nemolab.store.layout import BlockLayout, ExpertViews
from nemolab.store.lru import LRU
from nemolab.store.reader import BlockReader
from nemolab.store.repack import RepackResult, repack
from nemolab.store.store import Store
from nemolab.store.verify import VerifyResult, verify

__all__ = [
    "LRU",
    "BlockLayout",
    "BlockReader",
    "ExpertCache",
    "ExpertViews",
    "RepackResult",
    "Store",
    "VerifyResult",
    "ensure_store",
    "repack",
    "verify",
]
