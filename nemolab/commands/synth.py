"""`nemolab synth`: a checkpoint with random weights in the vendor's form, of any shape."""

from dataclasses import asdict

import click

from nemolab.commands.verb import Answer, FiniteRange, PathName, verb
from nemolab.errors import UsageError
from nemolab.progress import progress_bar
from nemolab.units import show_bytes

# As the package has them (a test compares); written out so that `nemolab --help` stays quick.
SHAPES = ("super", "super35", "super35-vl", "nano", "lightning", "tiny")
LAYERS_AS = ("pattern", "block_types", "linear_block_types", "layer_types")


@verb("synth")
@click.option(
    "--shape",
    default="super",
    show_default=True,
    metavar="|".join(SHAPES),
    help="Whose names, metadata, sizes and number formats.",
)
@click.option("--to", "target", type=PathName(), required=True, metavar="DIR", help="A new or empty folder.")
@click.option(
    "--moe-layers",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Keep the first N MoE layers and what lies between them, with at least one attention layer.",
)
@click.option(
    "--set",
    "words",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field of config.json; the value is JSON, else a word. May be repeated. Short names: pattern,"
    " experts, top_k, latent. An unknown one lists them all.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--shards", type=click.IntRange(min=1), default=None, metavar="N", help="How many files.")
@click.option(
    "--shard-size",
    default=None,
    metavar="SIZE",
    help="About the most bytes of a file; without it 5GB, and three files at least.",
)
@click.option("--layers-as", type=click.Choice(LAYERS_AS), default=None, help="How config.json lists the layers.")
@click.option("--vision", type=click.Choice(["timm", "hf"]), default=None, help="Names of the vision tower (VL only).")
@click.option("--mtp/--no-mtp", default=True, show_default=True, help="With the multi-token-prediction block, if any.")
@click.option(
    "--sparsity",
    type=FiniteRange(0.5, 0.99),
    default=0.9,
    show_default=True,
    help="Share of routed neurons that ReLU^2 leaves at zero.",
)
@click.option(
    "--skew",
    type=FiniteRange(0, 5),
    default=0.8,
    show_default=True,
    help="Popularity of experts falls as rank^-SKEW.",
)
def synth(shape, target, moe_layers, words, seed, shards, shard_size, layers_as, vision, mtp, sparsity, skew):
    """Write a checkpoint with random weights in the vendor's form.

    Real names, number formats, metadata and shards of a published model, whole or cut to its first layers, at its own
    sizes or at any others. Values are random but made so that wrong bytes change the logits; sparse neurons and
    popular experts are planted. Streaming: memory stays small whatever the size.

    config.json gets its name last, so what is unfinished never looks like a checkpoint. Ctrl-C and errors remove what
    was written; after a kill remove the folder and run the same command again. What the engine could not run or
    `nemolab compare` could not judge is refused at once.

    \b
    Examples:
      nemolab synth --shape super --moe-layers 1 --to /nvme/one-layer
      nemolab synth --shape nano --set n_routed_experts=8 --set hidden_size=256 --to /tmp/nano
      nemolab synth --shape tiny --set pattern=ME*E --seed 1 --to /tmp/small --json
      nemolab synth --shape super35-vl --vision hf --moe-layers 2 --to /nvme/vl
    """
    from nemolab.synthetic import write
    from nemolab.synthetic.shapes import parse_settings
    from nemolab.units import parse_budget

    shard_bytes = parse_budget(shard_size).size_bytes if shard_size is not None else None
    if shard_size is not None and shard_bytes is None:
        raise UsageError(f"--shard-size {shard_size}: bytes were expected, such as 5GB or 64MiB")
    result = write(
        target,
        shape,
        moe_layers=moe_layers,
        settings=parse_settings(words),
        seed=seed,
        shards=shards,
        shard_bytes=shard_bytes,
        layers_as=layers_as,
        vision_as=vision,
        mtp=mtp,
        sparsity=sparsity,
        skew=skew,
        progress=progress_bar("synth", "B"),
    )
    facts, rate = result.facts, result.bytes / result.seconds / 1e6
    lines = [
        f"{target}: {result.tensors:,} tensors in {result.shards:,} files, {show_bytes(result.bytes)}"
        f" in {result.seconds:.2f} s ({rate:,.0f} MB/s)",
        f"{facts.layers} layers {facts.pattern}; {facts.moe_layers} x {facts.experts} experts of"
        f" {facts.expert_bytes:,} bytes ({facts.pages:,.10g} pages), top-{facts.top_k}",
    ]
    if result.planted:
        lines.append(
            f"planted: {100 * result.planted['zero_neurons']:.4g}% of routed neurons at zero, a layer's most popular"
            f" expert chosen by {result.planted['most_popular_expert']:.0%} of tokens"
        )
    return Answer(asdict(result), "\n".join(lines))
