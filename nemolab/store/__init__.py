"""Stores: one block an expert on disk, read directly, cached in RAM. Importing this imports neither torch nor numba.

What a store is:
    layout, nibbles               where the bytes of an expert lie in its block
    files, manifest               names, finished files, checksums; what a store says about itself
Making one:
    contents                      what of a checkpoint goes where
    target, journal               the folder: who may write in it, how it is left, what is written already
    source_reader, writer         both ends past the page cache; workers between them
    expert_file, dense_file, tensor_file    the blocks, the rest of the model, small safetensors files
    repack                        all of it together
    cachefolder                   a store made on the way, where a command was given none
Using one:
    store                         opened: sizes, dense tensors, readers
    reader, direct_io             one aligned pread a block; the proof that it is direct
    arena, cache                  memory for blocks; with `nemolab.policy`, which of them stay
    verify                        is it what it should be? was it made from this checkpoint?
"""

from typing import TYPE_CHECKING

from nemolab.store.cachefolder import ensure_store
from nemolab.store.layout import BlockLayout, ExpertViews
from nemolab.store.reader import BlockReader
from nemolab.store.repack import RepackResult, repack
from nemolab.store.store import Store
from nemolab.store.verify import VerifyResult, check_source, verify

if TYPE_CHECKING:
    from nemolab.store.cache import ExpertCache

__all__ = [
    "BlockLayout",
    "BlockReader",
    "ExpertCache",
    "ExpertViews",
    "RepackResult",
    "Store",
    "VerifyResult",
    "check_source",
    "ensure_store",
    "repack",
    "verify",
]


def __getattr__(name: str):
    """ExpertCache, when it is first asked for: its compiled policy takes a second to import, and making and checking
    stores needs none, nor does the doctor, who is to find out what is wrong with numba."""
    if name == "ExpertCache":
        from nemolab.store.cache import ExpertCache

        return ExpertCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
