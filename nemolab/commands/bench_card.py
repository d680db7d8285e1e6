"""Benchmarks of `nemolab bench` that need a card, and what its decode needs of the command line."""

import statistics

import click

from nemolab.commands.device import TRANSFERS, device_option, refuse_rows_of_twins, transfer_option, vram_option
from nemolab.commands.measured import answer_with_rows
from nemolab.commands.verb import Answer, checkpoint_argument, verb
from nemolab.errors import UsageError


@verb("prefill")
@checkpoint_argument
@device_option("cuda")
@click.option("--tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of the prompt.")
@vram_option()
@click.option("--from-disk/--from-ram", default=True, show_default=True, help="Once more with no expert in RAM, too.")
@click.option("--repeats", type=click.IntRange(min=3), default=5, show_default=True, help="Rounds.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def prefill(path, device, tokens, vram, from_disk, repeats, record):
    """A prompt's pass through all layers of a card.

    Every expert that the prompt needs crosses the bus once, so one floor is their bytes over the bandwidth of a plain
    copy; the other is the time of torch's own BF16 products of the same shapes. Both are measured in the same run.
    Timed with all experts in RAM, then with all of them on disk, beside direct reads of the same blocks in order.

    \b
    Examples:
      nemolab bench prefill --tokens 512
      nemolab bench prefill /nvme/super --vram 8GiB --record --json
    """
    from nemolab.measure.bench_card_prefill import bench_card_prefill

    refuse_rows_of_twins(record, device)
    data = bench_card_prefill(path, device=device, tokens=tokens, repeats=repeats, vram_gib=vram, from_disk=from_disk)
    return answer_with_rows(data, record)


@verb("card-memory")
@checkpoint_argument
@device_option("cuda")
@vram_option("8GiB")
@click.option("--prompt", "prompt_tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens.")
@click.option("--tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Fed behind the prompt.")
@transfer_option(TRANSFERS[0])
@click.option("--record", is_flag=True, help="Keep the figures as rows in data/measurements.")
def card_memory(path, device, vram, prompt_tokens, tokens, transfer, record):
    """Does a long prompt stay within the memory that was allowed?

    The driver is asked every 2 ms how much of the card is in use, while the model is loaded, reads the prompt and goes
    on behind it; what was in use before is taken off. Beside it: what the engine planned, and what it found itself.
    Exit code 1 when the budget was exceeded.

    \b
    Examples:
      nemolab bench card-memory --vram 1GiB
      nemolab bench card-memory /nvme/super --vram 8GiB --record --json
    """
    from nemolab.measure.bench_card_memory import bench_card_memory

    data = bench_card_memory(
        path, device=device, vram_gib=vram, prompt_tokens=prompt_tokens, tokens=tokens, transfer=transfer
    )
    over = "" if data["within_budget"] else f"{data['peak_gib']:.3f} GiB were in use, {vram:g} allowed"
    answer = answer_with_rows(data, record)
    return Answer(answer.data, answer.text, over)


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

    return answer_with_rows(bench_linear(tokens, repeats), record)


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
    The strategies' outputs must be equal to the bit. `neurons` is none of them: it is `rows` with a group's scales read
    again for each active neuron.

    \b
    Examples:
      nemolab bench moe-step
      nemolab bench moe-step --active 0.5 --json
    """
    from nemolab.measure.bench_moe_step import bench_moe_step

    data = bench_moe_step(shape, experts, active, cached, steps, repeats)
    return answer_with_rows(data, record)


def parse_trial(word: str) -> dict:
    """`kept_gib=0.5,shared_first=1` as fields of Trials, and `prefetch`. Raises UsageError for what is none."""
    from dataclasses import fields

    from nemolab.engine import Trials

    truth = {"0": False, "false": False, "1": True, "true": True}
    known, trial = {field.name: type(field.default) for field in fields(Trials)} | {"prefetch": int}, {}
    for part in word.split(","):
        name, _, value = part.partition("=")
        try:
            trial[name] = truth[value] if known[name] is bool else known[name](value)
        except (KeyError, ValueError):
            raise UsageError(f"--trial {word}: one of {', '.join(known)}, = and its value were expected") from None
    return trial


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
