"""`nemolab compare`: the engine against transformers in fp32, with controls that must fail."""

import math
from datetime import datetime

import click

from nemolab.commands.device import device_option, refuse_on_cpu, refuse_rows_of_twins, vram_option
from nemolab.commands.verb import (
    Answer,
    PathName,
    checkpoint_argument,
    settings,
    share_cores,
    store_option,
    table,
    verb,
)
from nemolab.progress import progress_bar, say

RECORDED = {
    "ppl_engine": "perplexity",
    "ppl_reference": "perplexity",
    "kl_mean": "nats",
    "kl_max": "nats",
    "kl_mean_decode": "nats",
    "greedy_match": "tokens",
}
RECORDED_OF_CARDS = {
    "kl_mean_beside_cpu": "nats",
    "kl_max_beside_cpu": "nats",
    "kl_mean_decode_beside_cpu": "nats",
}


@verb("compare")
@checkpoint_argument
@store_option
@click.option(
    "--texts",
    type=PathName(),
    default=None,
    metavar="FOLDER|FILE",
    help="Compare on these .txt files instead of data/texts.",
)
@device_option()
@vram_option()
@click.option("--record", is_flag=True, help="Keep the figures as rows in data/measurements.")
def compare(path, store, texts, device, vram, record):
    """Does the engine compute what the model is?

    The reference is transformers' own NemotronH in fp32 on the CPU, with weights from the vendor's files (not from
    the store). Shown for each text: perplexity of both (PPL), KL divergence of the engine from the reference over the
    full vocabulary in nats, for the prompt pass and for decode, and how many of 64 greedy tokens agree. Then controls
    that must fail (swapped nibbles, a neighbour's scales, no routed experts) and a test of bit-identical repeats:
    three runs here and one in another process. On a card also by every transfer strategy, and each text's KL from the
    CPU's engine.

    \b
    Examples:
      nemolab compare
      nemolab compare --device cuda --vram 8GiB
      nemolab compare /models/nemotron-super --store /nvme/super --json
    """
    refuse_on_cpu(device, vram=vram)
    refuse_rows_of_twins(record, device)
    share_cores()
    from nemolab.compare import compare as measure

    data = measure(
        path,
        store=store,
        texts=texts,
        progress=progress_bar("compare", " steps"),
        device=device,
        vram_gib=vram,
    )
    figures = ["kl_mean", "kl_max", "kl_mean_decode"]
    if device != "cpu":
        figures += ["kl_mean_beside_cpu", "kl_mean_decode_beside_cpu"]
    columns = ["name", "tokens", "ppl_engine", "ppl_reference", *figures, "greedy"]
    rows = [
        [text["name"], text["tokens"], f"{text['ppl_engine']:.4f}", f"{text['ppl_reference']:.4f}"]
        + [f"{text[key]:.2e}" for key in figures]
        + [f"{text['greedy_match']}/{text['greedy_of']}"]
        for text in data["texts"]
    ]
    controls = [[control["name"], control["ppl"], control["failed_as_it_must"]] for control in data["controls"]]
    text = "\n\n".join(
        [
            table(columns, rows),
            table(["control", "ppl", "failed as it must"], controls),
            f"bit-identical repeats: {'yes' if data['deterministic'] else 'NO'}"
            f" ({', '.join(data['determinism']['logits_sha256'])})",
        ]
    )
    if record:
        record_comparison(data, settings().began)
    return Answer(data, text, "; ".join(data["problems"]))


def record_comparison(data: dict, began: datetime) -> None:
    """Rows of `data/measurements/compare.jsonl`: one a text and figure, two a control, one for all repeats.

    What is infinite has no row. began  when the comparison did
    """
    from nemolab.measure import record_run

    def keep(name: str, value: float, unit: str, **said) -> None:
        if math.isfinite(value):
            rows.append({"name": f"compare.{name}", "values": [value], "unit": unit, "settings": {**shared, **said}})
        else:
            say(f"compare.{name} is {value} and has no row: {said}")

    rows: list[dict] = []
    shared = {"model": data["model"], "threads": data["threads"], "layout": data["store_layout"]}
    if data["device"] != "cpu":
        shared |= {"device": data["device"], "vram_gib": data["vram_gib"]}
    for text in data["texts"]:
        for name, unit in (RECORDED | (RECORDED_OF_CARDS if data["device"] != "cpu" else {})).items():
            keep(name, text[name], unit, text=text["name"], tokens=text["tokens"], greedy_of=text["greedy_of"])
    for control in data["controls"]:
        keep("control_ppl", control["ppl"], "perplexity", control=control["name"])
        keep("control_kl_mean_least", control["kl_mean_least"], "nats", control=control["name"])
    repeats = data["determinism"]
    runs = repeats["logits_sha256"]
    said = {"runs": list(runs), "prompt_tokens": repeats["prompt_tokens"], "steps": repeats["steps"]}
    keep("distinct_repeats", len(set(runs.values())), "hashes of logits", **said)
    record_run(rows, began)
