"""`nemolab bench`: timings as ratios taken in one run, with their samples, settings and machine."""

from collections.abc import Callable

import click

from nemolab.commands.bench_card import card_memory, decode_table, linear, moe_step, parse_trial, prefill
from nemolab.commands.bench_turns import turns
from nemolab.commands.device import (
    EVERY,
    cache_size,
    device_option,
    ram_cache_option,
    refuse_on_cpu,
    refuse_rows_of_twins,
    transfer_option,
    vram_option,
)
from nemolab.commands.measured import answer_with_rows, plain
from nemolab.commands.verb import Answer, FiniteRange, PathName, checkpoint_argument, table, verb


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
@device_option()
@transfer_option(every=True)
@click.option(
    "--cached", type=FiniteRange(0, 1, min_open=True), default=None, help="Share of experts in RAM. [default: 0.24]"
)
@click.option("--prefetch", type=click.IntRange(min=0), default=None, help="Guesses read ahead. [default: 4]")
@vram_option()
@click.option("--trace", type=PathName(), default=None, metavar="FILE", help="Send tokens where a trace did.")
@click.option(
    "--trial",
    "trials",
    multiple=True,
    metavar="NAME=VALUE",
    help="Also with this: prefetch=0, no_graphs=1, shared_first=1, speculate=4, kept_gib=0.5; commas join several.",
)
@click.option("--own-routing", "own", is_flag=True, default=None, help="Send tokens where the model's routers say.")
@common_options
def decode(path, tokens, device, repeats, threads, record, **on_a_card):
    """One token at a time: on the CPU against transformers, on a card against the time of its bytes.

    On the CPU: everything cached, the same weights and token ids for both. transformers holds the whole model in fp32,
    so PATH must be small.

    With --device cuda: how long a token's bytes take over the bus, from disk and out of the card's memory, at the
    bandwidths of the same run; the longest is the floor. A synthetic model's routers route like nobody's, so tokens
    are sent where draws with the published statistics say: 40 % repeats, 81 to 84 % hits with 24 % cached. Each --trial
    is measured beside none: without guesses read ahead (prefetch=0), without CUDA graphs (no_graphs=1), or with what
    is off as a rule (shared_first, speculate, kept_gib).

    \b
    Examples:
      nemolab bench decode
      nemolab bench decode --repeats 15 --record --json
      nemolab bench decode --device cuda --own-routing
      nemolab bench decode /nvme/super --device cuda --transfer all --vram 8GiB --record
      nemolab bench decode /nvme/super --device cuda --transfer rows --trial kept_gib=2 --trial speculate=4
      nemolab bench decode /nvme/super --device cuda --trial prefetch=0 --trial no_graphs=1
    """
    given = {name: value for name, value in on_a_card.items() if value not in (None, ())}
    if device == "cpu":
        from nemolab.measure.bench import bench_decode

        words = {"own": "own_routing", "trials": "trial"}
        refuse_on_cpu(device, **{words.get(name, name): value for name, value in given.items()})
        return answer_with_rows(bench_decode(path, tokens=tokens or 64, repeats=repeats, threads=threads), record)
    from nemolab.engine.transfers import DEFAULT, TRANSFERS
    from nemolab.measure.bench_card_decode import bench_card_decode

    transfer = given.pop("transfer", DEFAULT)
    given["transfers"] = TRANSFERS if transfer == EVERY else (transfer,)
    given["vram_gib"] = given.pop("vram", None)
    given["trials"] = [parse_trial(word) for word in given.pop("trials", ())]
    refuse_rows_of_twins(record, device)
    data = bench_card_decode(path, device=device, tokens=tokens or 16, repeats=repeats, threads=threads, **given)
    answer = answer_with_rows(data, record)
    return Answer(data, f"{table(*decode_table(data))}\n\n{answer.text}")


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

    return answer_with_rows(bench_expert(shape, experts, active, repeats, threads), record)


@verb("trace")
@checkpoint_argument
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Fed one by one a round.")
@ram_cache_option
@click.option(
    "--prefetch", type=click.IntRange(min=0), default=0, show_default=True, help="Guesses read ahead a layer."
)
@common_options
def trace(path, tokens, ram_cache, prefetch, repeats, threads, record):
    """Decode while it is recorded, against decode that is not.

    slowdown is the time of a recorded token over that of a plain one. What is derived from it after an answer (guesses
    for three layers, counts of active neurons) is derive_ms. With all experts in RAM no read hides the cost.

    \b
    Examples:
      nemolab bench trace
      nemolab bench trace --repeats 31 --record --json
    """
    from nemolab.measure.bench_trace import bench_trace

    found = bench_trace(path, tokens, repeats, threads, prefetch, **cache_size(ram_cache))
    return answer_with_rows(found, record)


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
        return answer_with_rows(bench_repack_memory(layout=layout, folder=folder), record)
    return answer_with_rows(bench_repack(layout, gib, folder, repeats), record)


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
    answer = answer_with_rows(data, record)
    speeds = [[name, plain(rate), plain(data["first_call_s"][name])] for name, rate in data["million_per_s"].items()]
    speeds_table = table(["policy", "million lookups/s", "first call, s"], speeds)
    return Answer(data, f"{speeds_table}\n\n{answer.text}")


@verb("bookkeeping")
@click.option("--prefetch", type=click.IntRange(min=1), default=4, show_default=True, help="Guesses ahead a layer.")
@click.option("--policy", default="lru", show_default=True, help="What leaves the cache, as in `nemolab simulate`.")
@click.option("--tokens", type=click.IntRange(min=1), default=20, show_default=True, help="In a row, for a sample.")
@click.option("--repeats", type=click.IntRange(min=3), default=15, show_default=True, help="Rounds.")
@device_option()
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def bookkeeping(prefetch, policy, tokens, repeats, device, record):
    """CPU time that the RAM cache needs to decide, for the 880 lookups of one token of Nemotron-3-Super.

    Synthetic routing with the published hit rate; reads cost nothing here, so that only decisions, tables and rows are
    timed: CPU milliseconds of one thread. lookup is without reads ahead, lookup_ahead with them, fetch in the two steps
    that a card's engine takes, decisions the part of lookup that a replay does too. The target is 1 ms for lookup.
    With --device cuda also card and card_ahead: fetch, and the table on the card that says where experts lie.

    \b
    Examples:
      nemolab bench bookkeeping
      nemolab bench bookkeeping --device cuda --record
      nemolab bench bookkeeping --policy sieve --json
    """
    from nemolab.measure.bench_bookkeeping import bench_bookkeeping

    refuse_rows_of_twins(record, device)
    return answer_with_rows(bench_bookkeeping(tokens, repeats, prefetch, policy, device=device), record)


bench.add_command(decode)
bench.add_command(prefill)
bench.add_command(turns)
bench.add_command(card_memory)
bench.add_command(expert)
bench.add_command(repack)
bench.add_command(trace)
bench.add_command(linear)
bench.add_command(replay)
bench.add_command(moe_step)
bench.add_command(bookkeeping)
