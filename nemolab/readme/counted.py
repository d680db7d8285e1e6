"""Tables of models, policies, notebooks and claims: counted or replayed, on no machine."""

from functools import cache

from nemolab import paths
from nemolab.readme.markdown import markdown_table


def bytes_table() -> str:
    """Bytes per token of the models we count and of published ones."""
    from nemolab.plan import compare_models

    rows = [
        [
            row.model,
            f"{row.moe_layers} x {row.top_k} of {row.experts}",
            f"{row.expert_bytes:,}",
            f"{row.pages_per_expert:,.6g}",
            f"{row.bytes_per_token:,}",
            f"{row.routed_gib:,.4g}",
            row.how,
        ]
        for row in compare_models(paths.tiny_folder()).itertuples()
    ]
    headers = ["model", "experts read per token", "bytes an expert:", "pages:", "bytes a token:"]
    return markdown_table([*headers, "all experts, GiB:", "how"], rows)


def families_table() -> str:
    """Bytes per token of other families, counted from their configs."""
    from nemolab.plan import compare_families

    rows = [
        [
            row.model,
            f"{row.moe_layers} x {row.top_k} of {row.experts}",
            row.expert_format,
            f"{row.expert_bytes:,}",
            f"{row.gb_per_token:,.3f}",
            f"{row.gb_per_token_nvfp4:,.3f}",
            f"{row.routed_gib:,.1f}",
            f"{row.total_params / 1e9:,.2f}",
            f"{row.active_params_per_token / 1e9:,.2f}",
        ]
        for row in compare_families().itertuples()
    ]
    headers = ["model", "experts read per token", "published in", "bytes an expert:", "GB a token:"]
    more = ["GB a token in NVFP4:", "all experts, GiB:", "parameters, 10⁹:", "used by a token, 10⁹:"]
    return markdown_table([*headers, *more], rows)


@cache
def policies_table() -> str:
    """Decode hit rates of the shipped trace by policy and size, where the cliff is, and engine against replay."""
    from nemolab.policy import POLICIES
    from nemolab.sample_trace import find_trace
    from nemolab.simulate import POLICY_NAMES, advise, check_live, from_trace, lru_curve, replay
    from nemolab.trace import read_trace
    from nemolab.units import show_bytes

    trace = read_trace(find_trace(model=paths.tiny_folder()))
    lookups = from_trace(trace)
    sizes = {f"{share:.0%}": round(share * lookups.n_keys) for share in (0.1, 0.24, 0.5, 0.75)}
    found = {
        (policy, slots): replay(lookups, policy, slots=slots).row("decode")
        for policy in POLICY_NAMES
        for slots in sizes.values()
    }
    rows = [
        [
            policy,
            POLICIES[policy].about if policy in POLICIES else "an LRU for each layer, with an equal share",
            *(f"{100 * found[policy, slots]['hit_rate']:.1f}" for slots in sizes.values()),
        ]
        for policy in POLICY_NAMES
    ]
    reads = [f"{found['lru', slots]['reads_per_token']:.2f}" for slots in sizes.values()]
    rows.append(["", "blocks read a token under LRU", *reads])
    headers = [f"{share} = {slots} blocks:" for share, slots in sizes.items()]
    facts = found["lru", sizes["24%"]]
    floor = advise(lookups, lru_curve(lookups, in_slots=True)).floor
    live = check_live(trace)
    agree = "all are equal" if live.equal else f"{len(live.differing)} DIFFER"
    conversations = len(trace.meta.taken["conversations"])
    ahead = replay(lookups, "lru", slots=sizes["24%"], prefetch=4).row("decode")
    on_demand = ahead["misses"] / ahead["tokens"]
    return (
        f"Decode lookups that hit, %: {facts['lookups']:,} lookups of {facts['tokens']:,} tokens in {conversations} "
        f"conversations, the cache carried from one to the next, by the share of {lookups.n_keys} blocks "
        f"({show_bytes(int(lookups.size_bytes.sum()))}) that it holds. Exact and offline: no machine, no spread.\n\n"
        f"{markdown_table(['policy', 'what it does', *headers], rows)}\n\n"
        f"- Up to {floor.slots} blocks, (layers - 1) x top_k, an LRU hits nothing.\n"
        f"- Paper against practice: the engine that recorded this, with {live.settings['slots']} blocks, missed "
        f"{int(live.live[live.live >= 0].sum()):,} times, a replay misses {int(live.replayed.sum()):,} times; of "
        f"{live.compared:,} batches {agree}.\n"
        f"- Four guesses read ahead for each layer, at 24%: {on_demand:.2f} reads a token to wait for instead of "
        f"{facts['reads_per_token']:.2f}, and {ahead['reads_per_token']:.2f} in all."
    )


def notebooks_table() -> str:
    """Each notebook's question and the headline of its committed outputs."""
    import nbformat

    from nemolab.notebooks import find_notebooks
    from nemolab.report import find_headline

    rows = []
    for path in find_notebooks():
        notebook = nbformat.read(path, as_version=4)
        title = notebook.cells[0].source.splitlines()[0].removeprefix(f"# {path.stem[:2]} ")
        rows.append([f"[{path.stem}](notebooks/{path.name})", title, find_headline(notebook)])
    return markdown_table(["notebook", "question", "answer on the shipped model"], rows)


def claims_table() -> str:
    """The ledger of claims."""
    from nemolab.plan import claims_table as make
    from nemolab.plan import read_claims

    return make(read_claims())
