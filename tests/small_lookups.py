"""Lookups given as lists of keys, for small examples with known answers."""

from collections.abc import Sequence

import numpy as np

from nemolab.simulate import DECODE, Lookups


def from_batches(
    batches: Sequence[Sequence[int]],
    *,
    n_keys: int | None = None,
    size_bytes: int | Sequence[int] | None = 1,
    phase: Sequence[int] | None = None,
    conversation: Sequence[int] | None = None,
    guesses: Sequence[Sequence[int]] | None = None,
    prefill_warms: bool = False,
) -> Lookups:
    """A trace of one layer: keys of each batch, which is a step. An empty one is a step that the layer did not see.

    size_bytes  bytes by key, or one number for all; guesses: keys guessed for each batch, of any length
    """
    if n_keys is None:
        n_keys = 1 + max((key for batch in (*batches, *(guesses or ())) for key in batch), default=-1)
    kept = [number for number, batch in enumerate(batches) if len(batch)]
    distinct = [list(dict.fromkeys(reversed(batches[number])))[::-1] for number in kept]
    n_batches = len(distinct)
    keys = np.array([key for batch in distinct for key in batch], np.int32)
    assert np.all((keys >= 0) & (keys < n_keys)), "compiled code would read and write beyond its arrays"

    def by_batch(values, default, kind):
        return np.asarray([default] * len(batches) if values is None else values, kind)[kept]

    if guesses is not None:
        longest = max(map(len, guesses), default=0)
        guesses = np.array([list(guesses[n]) + [-1] * (longest - len(guesses[n])) for n in kept], np.int32)
        guesses = guesses.reshape(n_batches, longest)
        assert np.all((guesses >= -1) & (guesses < n_keys))
    return Lookups(
        keys=keys,
        starts=np.cumsum([0, *map(len, distinct)], dtype=np.int64),
        layer=np.zeros(n_batches, np.int32),
        step=np.array(kept, np.int64),
        phase=by_batch(phase, DECODE, np.uint8),
        conversation=by_batch(conversation, 0, np.int32),
        tokens=np.ones(n_batches, np.int32),
        guesses=guesses,
        size_bytes=None if size_bytes is None else np.broadcast_to(np.asarray(size_bytes, np.int64), n_keys).copy(),
        n_layers=1,
        n_experts=n_keys,
        top_k=max(map(len, distinct), default=0),
        prefill_warms=prefill_warms,
    )
