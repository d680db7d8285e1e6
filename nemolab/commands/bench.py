"""`nemolab bench`: timings as ratios taken in one run, with their samples, settings and machine."""

import statistics
from collections.abc import Callable

import click

from nemolab.commands.verb import Answer, FiniteRange, PathName, checkpoint_argument, refuse_rows_of_twins, table, verb
from nemolab.errors import UsageError


@click.group("bench")
def bench():
    """How fast is it, beside a floor or a rival measured in the same run?

    Both sides take turns in one process; medians with all samples, and no winner inside the spread. Times are wall
    milliseconds. A laptop's numbers say little about another machine: compare rows of one machine only. --record keeps
    them with the commit of the code that measured; in a copy that git does not know, set NEMOLAB_COMMIT to it
    (abc123def456, or abc123def456+changes).

    \b
    Examples:
      nemolab bench decode
      nemolab bench expert --active 0.075 --record --json
      nemolab bench repack --folder /nvme
      nemolab bench replay
      nemolab bench decode --device cuda --transfer all --own-routing
    """


def common_options(function: Callable) -> Callable:
    """--repeats, --threads, --record."""
    for option in (
        click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements."),
        click.option("--threads", type=click.IntRange(min=1), default=None, help="Of both sides; default: torch's."),
        click.option("--repeats", type=click.IntRange(min=3), default=9, show_default=True, help="Rounds."),
    ):
        function = option(function)
    return function


@verb("decode")
@checkpoint_argument
@click.option("--tokens", type=click.IntRange(min=1), default=None, help="Fed one by one a sample. [default: 64; 16]")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda", help="Where the engine runs.")
@click.option(
    "--transfer", default=None, metavar="pull|rows|grouped|whole|all", help="How experts come. [default: pull]"
)
@click.option(
    "--cached", type=FiniteRange(0, 1, min_open=True), default=None, help="Share of experts in RAM. [default: 0.24]"
)
@click.option("--prefetch", type=click.IntRange(min=0), default=None, help="Guesses read ahead. [default: 4]")
@click.option("--vram-gib", type=FiniteRange(min=0, min_open=True), default=None, help="Of the card's memory.")
@click.option("--trace", type=PathName(), default=None, metavar="FILE", help="Send tokens where a trace did.")
@click.option("--own-routing", "own", is_flag=True, default=None, help="Send tokens where the model's routers say.")
@common_options
def decode(path, tokens, device, repeats, threads, record, **on_a_card):
    """One token at a time: on the CPU against transformers, on a card against the time of its bytes.

    On the CPU: everything cached, the same weights and token ids for both. transformers holds the whole model in fp32,
    so PATH must be small.

    With --device cuda: how long a token's bytes take over the bus, from disk and out of the card's memory, at the
    bandwidths of the same run; the longest is the floor. A synthetic model's routers route like nobody's, so tokens
    are sent where draws with the published statistics say: 40 % repeats, 81 to 84 % hits with 24 % cached.

    \b
    Examples:
      nemolab bench decode
      nemolab bench decode --repeats 15 --record --json
      nemolab bench decode --device cuda --own-routing
      nemolab bench decode /nvme/super --device cuda --transfer all --vram-gib 8 --record
    """
    given = {name: value for name, value in on_a_card.items() if value is not None}
    if device == "cpu":
        from nemolab.measure.bench import bench_decode

        if given:
            names = ", ".join(f"--{'own-routing' if name == 'own' else name.replace('_', '-')}" for name in given)
            raise UsageError(f"{names}: for an engine on a card; add --device cuda")
        return _answer(bench_decode(path, tokens=tokens or 64, repeats=repeats, threads=threads), record)
    from nemolab.measure.bench_card_decode import bench_card_decode
    from nemolab.measure.transfer import STRATEGIES

    transfer = given.pop("transfer", "pull")
    given["transfers"] = STRATEGIES if transfer == "all" else (transfer,)
    refuse_rows_of_twins(record, device)
    data = bench_card_decode(path, device=device, tokens=tokens or 16, repeats=repeats, threads=threads, **given)
    answer = _answer(data, record)
    return Answer(data, f"{table(*decode_table(data))}\n\n{answer.text}")


def decode_table(data: dict) -> tuple[list[str], list[list]]:
    """Headers and rows of what `bench_card_decode` found, a row a case."""
    headers = ["case", "ms/token", "least", "most", "floor ms", "is of", "x floor", "hit rate", "reads", "CPU ms"]
    rows = []
    for row in data["rows"]:
        if row["unit"] == "ms/token":
            ms, said = statistics.median(row["values"]), row["settings"]
            figures = [ms, min(row["values"]), max(row["values"]), said["floor_ms"]]
            rows.append([row["name"].partition(".")[2], *figures, said["floor_is"], ms / said["floor_ms"]])
            rows[-1] += [said["hit_rate"], said["reads"], said["cpu_ms"]]
    return headers, rows


@verb("prefill")
@checkpoint_argument
@click.option("--device", default="cuda", show_default=True, metavar="cuda|cuda:1", help="Which card.")
@click.option("--tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of the prompt.")
@click.option("--vram-gib", type=FiniteRange(min=0, min_open=True), default=None, help="Of the card's memory.")
@click.option("--from-disk/--from-ram", default=True, show_default=True, help="Once more with no expert in RAM, too.")
@click.option("--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="Rounds.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def prefill(path, device, tokens, vram_gib, from_disk, repeats, record):
    """A prompt's pass through all layers of a card.

    Every expert that the prompt needs crosses the bus once, so one floor is their bytes over the bandwidth of a plain
    copy; the other is the time of torch's own BF16 products of the same shapes. Both are measured in the same run.
    Timed with all experts in RAM, then with all of them on disk, whose direct reads are a floor as well.

    \b
    Examples:
      nemolab bench prefill --tokens 512
      nemolab bench prefill /nvme/super --vram-gib 8 --record --json
    """
    from nemolab.measure.bench_card_prefill import bench_card_prefill

    refuse_rows_of_twins(record, device)
    data = bench_card_prefill(
        path, device=device, tokens=tokens, repeats=repeats, vram_gib=vram_gib, from_disk=from_disk
    )
    return _answer(data, record)


@verb("expert")
@click.option("--shape", default="super", show_default=True, help="Sizes of an expert: super, nano or tiny.")
@click.option("--experts", type=click.IntRange(min=1), default=44, show_default=True, help="How many at once.")
@click.option(
    "--active",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of neurons that are not zero; 1 is the worst case, 0.075 the large model's.",
)
@common_options
def expert(shape, experts, active, repeats, threads, record):
    """Experts straight from their 4-bit blocks, against torch's fp32 products.

    The floor is the bytes they must read over the memory bandwidth measured in the same run.

    \b
    Examples:
      nemolab bench expert
      nemolab bench expert --shape nano --active 0.075 --json
    """
    from nemolab.measure.bench import bench_expert

    return _answer(bench_expert(shape, experts, active, repeats, threads), record)


@verb("trace")
@checkpoint_argument
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Fed one by one a round.")
@click.option("--slots", type=click.IntRange(min=1), default=None, help="Blocks in RAM. Default: all of them.")
@click.option(
    "--prefetch", type=click.IntRange(min=0), default=0, show_default=True, help="Guesses read ahead a layer."
)
@common_options
def trace(path, tokens, slots, prefetch, repeats, threads, record):
    """Decode while it is recorded, against decode that is not.

    slowdown is the time of a recorded token over that of a plain one. What is derived from it after an answer (guesses
    for three layers, counts of active neurons) is derive_ms. By default all experts are cached: no read hides the cost.

    \b
    Examples:
      nemolab bench trace
      nemolab bench trace --repeats 31 --record --json
    """
    from nemolab.measure.bench_trace import bench_trace

    return _answer(bench_trace(path, tokens, repeats, threads, slots, prefetch), record)


@verb("repack")
@click.option("--layout", type=click.Choice(["neuron", "source"]), default="neuron", show_default=True)
@click.option("--gib", type=FiniteRange(0.25, 64), default=2.0, show_default=True, help="Size of the checkpoint.")
@click.option(
    "--folder",
    type=PathName(),
    default=None,
    metavar="DIR",
    help="On the disk to measure; needs 2.2 times the size. Default: the cache folder.",
)
@click.option("--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="Rounds.")
@click.option("--memory", is_flag=True, help="Instead: peak memory of repacking all of Super, on sparse files.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def repack(layout, gib, folder, repeats, memory, record):
    """Repack against a plain direct copy of the same bytes on the same disk.

    A synthetic checkpoint of Super's shapes is written, then copied and repacked in turns, both past the page cache.
    GB/s count the bytes written; of_copy is repack's rate over the copy's. The store is verified before anything is
    reported, and everything is removed afterwards.

    \b
    Examples:
      nemolab bench repack --folder /nvme
      nemolab bench repack --layout source --gib 8 --record --json
      nemolab bench repack --memory
    """
    from nemolab.measure.bench_repack import bench_repack, bench_repack_memory

    if memory:
        return _answer(bench_repack_memory(layout=layout, folder=folder), record)
    return _answer(bench_repack(layout, gib, folder, repeats), record)


@verb("linear")
@click.option("--tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of the prompt.")
@click.option("--repeats", type=click.IntRange(min=3), default=9, show_default=True, help="Rounds.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def linear(tokens, repeats, record):
    """Dense products on a CUDA card, straight from FP8 and 4-bit bytes.

    One token: matrices of 64 MB and more, one after another, beside the bandwidth of a kernel that only reads.
    A prompt: beside torch's BF16 product of the same shape. All in one run. Needs a card.

    \b
    Examples:
      nemolab bench linear
      nemolab bench linear --tokens 512 --record --json
    """
    from nemolab.measure.bench_linear import bench_linear

    return _answer(bench_linear(tokens, repeats), record)


@verb("replay")
@click.option("--trace", type=PathName(), default=None, metavar="FILE", help="Routing; default: synthetic, as Super's.")
@click.option("--tokens", type=click.IntRange(min=2), default=5000, show_default=True, help="Of the synthetic trace.")
@click.option("--alone", is_flag=True, help="Without libCacheSim beside it.")
@click.option("--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="Rounds.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def replay(trace, tokens, alone, repeats, record):
    """How fast traces are replayed: every policy, the whole LRU curve, and libCacheSim's trace runner beside them.

    The synthetic trace has 40 layers, top 22 of 512 experts: 880 lookups a token. One thread, wall time, compiled
    beforehand. libCacheSim (pip install libcachesim) runs the same keys one by one, as ours do in that part, at 32
    sizes of cache; it gets the size of hash table with which it is fastest.

    \b
    Examples:
      nemolab bench replay
      nemolab bench replay --tokens 500 --alone
      nemolab bench replay --trace my.trace --record --json
    """
    from nemolab.measure.bench_replay import bench_replay

    data = bench_replay(trace, tokens=tokens, repeats=repeats, rival=not alone)
    answer = _answer(data, record)
    speeds = [[name, _plain(rate), _plain(data["first_call_s"][name])] for name, rate in data["million_per_s"].items()]
    speeds_table = table(["policy", "million lookups/s", "first call, s"], speeds)
    return Answer(data, f"{speeds_table}\n\n{answer.text}")


@verb("bookkeeping")
@click.option("--prefetch", type=click.IntRange(min=1), default=4, show_default=True, help="Guesses ahead a layer.")
@click.option("--policy", default="lru", show_default=True, help="What leaves the cache, as in `nemolab simulate`.")
@click.option("--tokens", type=click.IntRange(min=1), default=20, show_default=True, help="In a row, for a sample.")
@click.option("--repeats", type=click.IntRange(min=3), default=15, show_default=True, help="Rounds.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def bookkeeping(prefetch, policy, tokens, repeats, record):
    """CPU time that the RAM cache needs to decide, for the 880 lookups of one token of Nemotron-3-Super.

    Synthetic routing with the published hit rate; reads cost nothing here, so that only decisions, tables and rows are
    timed: CPU milliseconds of one thread. lookup is without reads ahead, lookup_ahead with them, decisions the part
    of lookup that a replay does too. The target is 1 ms for lookup.

    \b
    Examples:
      nemolab bench bookkeeping
      nemolab bench bookkeeping --policy sieve --json
    """
    from nemolab.measure.bench_bookkeeping import bench_bookkeeping

    return _answer(bench_bookkeeping(tokens, repeats, prefetch, policy), record)


@verb("moe-step")
@click.option("--shape", default="super", show_default=True, help="Sizes of an expert: super, nano or tiny.")
@click.option("--experts", type=click.IntRange(min=1), default=22, show_default=True, help="Chosen for a token.")
@click.option("--active", type=click.FloatRange(0, 1), default=0.075, show_default=True, help="Share of neurons.")
@click.option("--cached", type=click.IntRange(min=1), default=512, show_default=True, help="Experts to choose from.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="In a row, for a sample.")
@click.option("--repeats", type=click.IntRange(min=3), default=9, show_default=True, help="Rounds.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def moe_step(shape, experts, active, cached, steps, repeats, record):
    """One MoE layer on a CUDA card, by each way for experts to reach the arithmetic.

    Everything lies in page-locked memory. A strategy's floor is the time its bytes take: those it copies at the rate of
    a plain copy, those it reads in place at the rate of a kernel that only adds up; both are measured in the same run.
    The strategies' outputs must be equal to the bit.

    \b
    Examples:
      nemolab bench moe-step
      nemolab bench moe-step --active 0.5 --json
    """
    from nemolab.measure.bench_moe_step import bench_moe_step

    data = bench_moe_step(shape, experts, active, cached, steps, repeats)
    return _answer(data, record)


def _answer(data: dict, record: bool) -> Answer:
    if record:
        from nemolab.measure import record as keep

        for row in data["rows"]:
            keep(**row)
    facts = [[name, _plain(value)] for name, value in data.items() if isinstance(value, int | float | str)]
    settings = ", ".join(f"{name} {value}" for name, value in data["rows"][0]["settings"].items())
    return Answer(data, f"{table(['figure', 'value'], facts)}\n\n{settings}")


def _plain(value: int | float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


bench.add_command(decode)
bench.add_command(prefill)
bench.add_command(expert)
bench.add_command(repack)
bench.add_command(trace)
bench.add_command(linear)
bench.add_command(replay)
bench.add_command(moe_step)
bench.add_command(bookkeeping)
