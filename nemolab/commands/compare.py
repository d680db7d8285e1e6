"""`nemolab compare`: the engine against transformers in fp32, with controls that must fail."""

from pathlib import Path

import click

from nemolab.commands.verb import Answer, checkpoint_argument, progress_bar, table, verb


@verb("compare")
@checkpoint_argument
@click.option("--store", default=None, metavar="STORE", help="Use this store; else one is made in the cache folder.")
def compare(path, store):
    """Does the engine compute what the model is?

    The reference is transformers' own NemotronH in fp32 on the CPU, with weights from the vendor's files (not from
    the store). Shown for each text: perplexity of both (PPL), KL divergence of the engine from the reference over the
    full vocabulary in nats, for the prompt pass and for decode, and how many of 64 greedy tokens agree. Then controls
    that must fail (swapped nibbles, a neighbour's scales, no routed experts) and a test of bit-identical repeats.

    \b
    Examples:
      nemolab compare
      nemolab compare /models/nemotron-super --store /nvme/super --json
    """
    from nemolab.compare import compare as measure

    data = measure(path, store=Path(store).expanduser() if store else None, progress=progress_bar("compare", " steps"))
    columns = ["name", "tokens", "ppl_engine", "ppl_reference", "kl_mean", "kl_max", "kl_mean_decode", "greedy"]
    rows = [
        [text["name"], text["tokens"], f"{text['ppl_engine']:.4f}", f"{text['ppl_reference']:.4f}"]
        + [f"{text[key]:.2e}" for key in ("kl_mean", "kl_max", "kl_mean_decode")]
        + [f"{text['greedy_match']}/{text['greedy_of']}"]
        for text in data["texts"]
    ]
    controls = [[control["name"], control["ppl"], control["failed_as_it_must"]] for control in data["controls"]]
    text = "\n\n".join(
        [
            table(columns, rows),
            table(["control", "ppl", "failed as it must"], controls),
            f"bit-identical repeats: {'yes' if data['deterministic'] else 'NO'}",
        ]
    )
    return Answer(data, text, "; ".join(_problems(data)))


def _problems(data: dict) -> list[str]:
    from nemolab.compare import KL_BOUND

    found = [
        f"text {text['name']}: mean KL {text[key]:.3g} is above {KL_BOUND:g} ({key})"
        for text in data["texts"]
        for key in ("kl_mean", "kl_mean_decode")
        if not text[key] <= KL_BOUND
    ]
    found += [f"control {c['name']} did not fail" for c in data["controls"] if not c["failed_as_it_must"]]
    if not data["deterministic"]:
        found.append("repeats differ in their bits")
    return found
