"""`nemolab plan` and `nemolab inventory`: what a checkpoint holds and what one token reads of it."""

import click

from nemolab.commands.verb import Answer, checkpoint_argument, table, verb
from nemolab.units import show_bytes


@verb("plan")
@checkpoint_argument
@click.option(
    "--experts-as",
    type=click.Choice(["nvfp4", "mxfp4", "fp8", "bf16"]),
    default=None,
    help="Format of the routed experts, for a bare config only (default nvfp4). A folder's own tensors decide.",
)
def plan(path, experts_as):
    """How many bytes does one token read?

    PATH is a checkpoint folder or a bare config.json of the family. Whether a model "fits in VRAM" is the wrong
    question when experts stream from disk; what counts is layers x top_k x expert_bytes, the bytes of routed experts
    that one token needs.

    \b
    expert_bytes      packed values and block scales of one expert, unpadded, without its scalars
    pages_per_expert  expert_bytes / 4096; not always whole
    bytes_per_token   MoE layers x top_k x expert_bytes
    dense_bytes       everything that is no routed expert, with embeddings, without MTP and vision

    \b
    Examples:
      nemolab plan
      nemolab plan /models/nemotron-super --json
      nemolab plan data/configs/nemotron-3-nano.json --experts-as bf16
    """
    from nemolab.errors import UsageError
    from nemolab.plan import plan as count

    if experts_as and path.is_dir():
        raise UsageError(f"--experts-as is for a bare config.json; the tensors of {path} decide their own format")
    data = count(path, experts_as=experts_as or "nvfp4").to_dict()
    facts = [
        ["model", data["model_type"]],
        ["MoE layers x experts, top-k", f"{data['moe_layers']} x {data['experts']}, top-{data['top_k']}"],
        ["parameters of an expert", f"{data['expert_params']:,}"],
        ["bytes of an expert", f"{data['expert_bytes']:,} ({data['pages_per_expert']:,.2f} pages)"],
        ["bytes a token reads", f"{data['bytes_per_token']:,} ({show_bytes(data['bytes_per_token'])})"],
        ["routed experts, all", f"{data['routed_bytes']:,} ({show_bytes(data['routed_bytes'])})"],
        ["everything else", f"{data['dense_bytes']:,} ({show_bytes(data['dense_bytes'])})"],
    ]
    parts = [[part, size, show_bytes(size)] for part, size in data["parts"].items() if size]
    text = "\n\n".join([table(["", ""], facts).lstrip("\n "), table(["part", "bytes", ""], parts)])
    if not path.is_dir():
        text += f"\n\nA bare config: experts counted as {experts_as or 'nvfp4 (the default of --experts-as)'}."
    return Answer(data, text)


@verb("inventory")
@checkpoint_argument
@click.option("--tensors", is_flag=True, help="List every tensor, not only the sums.")
def inventory(path, tensors):
    """What is in a checkpoint, and in which number format?

    Reads only the headers of the shards. The format of each module (nvfp4, fp8, bf16, f32) is found from its tensors;
    metadata that disagrees is reported. Sizes are bytes as stored.

    \b
    Examples:
      nemolab inventory
      nemolab inventory /models/nemotron-super --tensors --json
    """
    from nemolab.checkpoint import Checkpoint, Inventory

    checkpoint = Checkpoint.open(path)
    frame = Inventory(checkpoint).frame()
    sums = frame.groupby(["part", "format"], observed=True)["bytes"].agg(["count", "sum"]).reset_index()
    rows = [[str(row.part), str(row.format), int(row.count_), int(row.sum_)] for row in _named(sums)]
    data = {
        "tensors": len(frame),
        "bytes": int(frame["bytes"].sum()),
        "sums": [dict(zip(("part", "format", "tensors", "bytes"), row, strict=True)) for row in rows],
        "notes": list(checkpoint.notes),
    }
    text = table(["part", "format", "tensors", "bytes"], rows)
    text += f"\n\n{data['tensors']:,} tensors, {data['bytes']:,} bytes ({show_bytes(data['bytes'])})"
    text += "".join(f"\nnote: {note}" for note in checkpoint.notes)
    if tensors:
        listed = frame.assign(shape=frame["shape"].map(list)).to_dict("records")
        data["list"] = listed
        text = table(list(frame.columns), [[row[column] for column in frame.columns] for row in listed]) + "\n\n" + text
    return Answer(data, text)


def _named(sums):
    return sums.rename(columns={"count": "count_", "sum": "sum_"}).itertuples(index=False)
