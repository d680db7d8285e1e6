"""An LRU replay of raw routing as the rules read, in lists and loops: no batches prepared, no keys, nothing shared.

Written from the rules alone ("What counts" in the design), apart from `nemolab.policy` and from `cache_twins`.
"""


def replay_plainly(
    experts, *, sizes, budget, phase, conversation, step, guesses=None, depth=0, cold=False, prefill_warms=False
):
    """One dict for each batch, in order.

    experts  ids [token][layer][rank], -1 for none; sizes  bytes by layer; phase, conversation, step  by token
    guesses  ids [token][layer][n], made for that layer
    Each dict: step, layer, lookups, missed (list of experts), first, useful, issued, wasted.
    """
    stack = []  # (layer, expert), the least recent first
    unused = set()  # prefetched, not asked for yet
    known = set()  # ever in the cache
    wasted = 0
    done = []

    def used():
        return sum(sizes[layer] for layer, _ in stack)

    def throw_out(spared, limit):
        """Victims leave, the least recent first, until used <= limit."""
        nonlocal wasted
        at = 0
        while used() > limit and at < len(stack):
            if stack[at] in spared:
                at += 1
                continue
            entry = stack.pop(at)
            wasted += entry in unused
            unused.discard(entry)

    tokens_of_step = {}
    for token, number in enumerate(step):
        tokens_of_step.setdefault(number, []).append(token)
    before = None
    running = []  # of the batch before, what is still in the cache
    for number, tokens in tokens_of_step.items():
        if not any(expert >= 0 for token in tokens for row in experts[token] for expert in row):
            continue  # of this step nothing is known
        if cold and before is not None and conversation[tokens[0]] != before:
            done[-1]["wasted"] += len(unused)
            stack, running, unused, known = [], [], set(), set()
        before = conversation[tokens[0]]
        prompt = phase[tokens[0]] == 0 and not prefill_warms
        for layer in range(len(sizes)):
            asked = [(layer, expert) for token in tokens for expert in experts[token][layer] if expert >= 0]
            distinct = [entry for at, entry in enumerate(asked) if entry not in asked[at + 1 :]]
            wasted_before, issued = wasted, []
            if depth and distinct and not prompt and len(tokens) == 1:
                # All of the round's reads are known before the first is issued.
                first_guesses = [(layer, expert) for expert in guesses[tokens[0]][layer][:depth] if expert >= 0]
                for entry in [entry for entry in first_guesses if entry not in stack]:
                    spared = {*running, *issued} & set(stack)
                    if entry in stack or sum(sizes[of] for of, _ in spared) + sizes[layer] > budget:
                        continue
                    throw_out(spared, budget - sizes[layer])
                    stack.append(entry)
                    unused.add(entry)
                    known.add(entry)
                    issued.append(entry)
            if not distinct:
                continue
            missed = [entry for entry in distinct if entry not in stack]
            first = [entry for entry in missed if entry not in known]
            useful = [entry for entry in distinct if entry in unused]
            unused -= set(useful)
            if not prompt:
                known |= set(missed)
                for entry in distinct:
                    if entry in stack:
                        stack.remove(entry)
                    stack.append(entry)
                throw_out(distinct, budget)
                throw_out((), budget)  # the batch alone exceeds it: its own oldest
                running = [entry for entry in distinct if entry in stack]
            done.append(
                {
                    "step": number,
                    "layer": layer,
                    "lookups": len(distinct),
                    "missed": [expert for _, expert in missed],
                    "first": len(first),
                    "useful": len(useful),
                    "issued": len(issued),
                    "wasted": wasted - wasted_before,
                }
            )
    if cold and done:
        done[-1]["wasted"] += len(unused)
    return done
