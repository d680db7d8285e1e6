"""Doubly linked lists of keys in two arrays: every key is in one list at most, oldest first.

List number j of n keys begins and ends at the sentinel n + j, so that no end is a special case.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner


class Links(NamedTuple):
    """The older and the newer neighbour of each key, then of each sentinel: int32 [n_keys + n_lists]."""

    older: np.ndarray
    newer: np.ndarray


def start_links(n_keys: int, n_lists: int = 1) -> Links:
    """Empty lists: each sentinel is its own neighbour."""
    return Links(*(np.arange(n_keys + n_lists, dtype=np.int32) for _ in range(2)))


@jit_inner
def append(links, sentinel, key):
    """`key`, in no list, becomes the newest."""
    newest = links.older[sentinel]
    links.older[key] = newest
    links.newer[key] = sentinel
    links.newer[newest] = key
    links.older[sentinel] = key


@jit_inner
def unlink(links, key):
    """`key` leaves whatever list it is in."""
    older, newer = links.older[key], links.newer[key]
    links.newer[older] = newer
    links.older[newer] = older


@jit_inner
def oldest_unmarked(links, sentinel, entries, stamp):
    """The oldest key of a list whose mark is not `stamp`, or -1."""
    key = np.int64(links.newer[sentinel])
    while key != sentinel and entries[key].mark == stamp:
        key = np.int64(links.newer[key])
    return -1 if key == sentinel else key


@jit_inner
def oldest(links, sentinel):
    """The oldest key of a list, or -1."""
    key = np.int64(links.newer[sentinel])
    return -1 if key == sentinel else key


@jit_inner
def join_list(state, key, where):
    """`key`, in no list, becomes the newest of list `where`, and that list's bytes are counted.

    state  of any policy with several lists: links, first_sentinel, where [n_keys], size_bytes [n_keys], and numbers,
           which begins with the bytes of each list
    """
    append(state.links, state.first_sentinel + where, key)
    state.where[key] = where
    state.numbers[where] += state.size_bytes[key]


@jit_inner
def leave_list(state, key):
    """`key` leaves the list it is in; `where` still says which that was."""
    unlink(state.links, key)
    state.numbers[state.where[key]] -= state.size_bytes[key]
