"""A whole trace through one cache, in one compiled loop over the rules of `nemolab.policy.core`."""

from __future__ import annotations

from nemolab.jit import jit, unowned
from nemolab.policy.core import ISSUED, WASTED, issue, look_up, look_up_passing, spare_nobody
from nemolab.policy.interface import pass_by


@jit
def run_batches(core, state, keys, starts, passing, guesses, depth, alone, outcome, issued, issued_bytes, wasted):
    """Look up batch after batch.

    keys int32 [lookups], starts int64 [batches + 1]: batch b is keys[starts[b]:starts[b + 1]], each key once
    passing   bool [batches]: prompt passes, which leave no trace
    guesses   int32 [batches, n]: keys guessed for the batch, -1 for none; the first `depth` are prefetched before it
    alone     the batch before is another cache's, so nothing of it is in use while a prefetch is issued
    outcome   uint8 [lookups], written: flags of `nemolab.policy.core`
    issued, issued_bytes, wasted   int64 [batches], written unless depth is 0: prefetched before the batch, what they
              take, and prefetched entries that left unused since the batch before
    """
    core, state, keys, guesses, outcome = unowned((core, state, keys, guesses, outcome))
    for batch in range(len(starts) - 1):
        first, last = starts[batch], starts[batch + 1]
        wasted_before = core.numbers[WASTED]
        if passing[batch]:
            look_up_passing(core, keys, first, last, outcome)
            pass_by(state, core.entries, keys, first, last)
        else:
            if depth:
                if alone:
                    spare_nobody(core)
                issued_bytes[batch] = issue(core, state, guesses[batch], depth, first)
                issued[batch] = core.numbers[ISSUED]
            look_up(core, state, keys, first, last, outcome)
        if depth:
            wasted[batch] = core.numbers[WASTED] - wasted_before
