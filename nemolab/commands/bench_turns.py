"""`nemolab bench turns`: what it costs and saves that a prompt's experts stay in RAM."""

import click

from nemolab.commands.device import device_options, place, refuse_rows_of_twins
from nemolab.commands.measured import answer_with_rows
from nemolab.commands.verb import Answer, FiniteRange, checkpoint_argument, table, verb


@verb("turns")
@checkpoint_argument
@device_options
@click.option(
    "--cached",
    type=FiniteRange(0, 1, min_open=True),
    default=0.24,
    show_default=True,
    help="Share of experts that stay in RAM.",
)
@click.option(
    "--prefetch", type=click.IntRange(min=0), default=0, show_default=True, help="Guesses read ahead a layer."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each turn's prompt."
)
@click.option("--tokens", type=click.IntRange(min=1), default=8, show_default=True, help="Of each turn's answer.")
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True, help="Of a conversation.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Conversations.")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="Of both sides; default: torch's.")
@click.option("--record", is_flag=True, help="Keep the samples as rows in data/measurements.")
def turns(path, device, transfer, vram, record, **settings):
    """Turns of a prompt and an answer, with prompts that pass the cache by and with prompts whose experts enter it.

    As a rule a prompt leaves no trace in the RAM cache: it needs nearly all experts, and would push out those of the
    answer before. Here a second engine keeps them (Trials, prompt_enters). Both are fed the same ids: of the shipped
    texts where the checkpoint's tokenizer knows words, else drawn as often as words come. Caches stay from turn to
    turn, the first turn is not counted, and every logit must be equal to the bit.

    Two engines take turns where RAM allows; with --vram, or too little RAM, one follows the other. Each prompt reads
    most of the model from disk, so that a turn of a large one takes seconds.

    \b
    Examples:
      nemolab bench turns
      nemolab bench turns --prompt-tokens 512 --tokens 64 --json
      nemolab bench turns /nvme/super --device cuda --transfer rows --record
    """
    from nemolab.measure.bench_turns import bench_turns

    where = place(device, transfer=transfer, vram=vram)
    refuse_rows_of_twins(record, device)
    data = bench_turns(path, **where, **settings)
    answer = answer_with_rows(data, record)
    return Answer(data, f"{table(*turns_table(data))}\n\n{answer.text}")


def turns_table(data: dict) -> tuple[list[str], list[list]]:
    """Headers and rows of what `bench_turns` found: a row for each side and phase, then how they compare."""
    headers = ["side", "phase", "ms", "least", "most", "hit rate", "reads", "MB read", "x passes"]
    rows = []
    for side in ("passes", "enters"):
        for phase in ("prompt", "token"):
            figures = [data[f"{side}_{phase}_{of}"] for of in ("ms", "least", "most", "hit_rate", "reads")]
            ratio = data[f"{phase}_of_passes"] if side == "enters" else 1.0
            rows.append([side, phase, *figures, data[f"{side}_{phase}_bytes_read"] / 1e6, ratio])
    return headers, rows
