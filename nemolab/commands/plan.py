"""`nemolab plan` and `nemolab inventory`: what a checkpoint holds and what one token reads of it."""

import click

from nemolab.commands.verb import Answer, checkpoint_argument, table, verb
from nemolab.units import show_bytes


@verb("plan")
@checkpoint_argument
@click.option(
    "--experts-as",
    type=click.Choice(["nvfp4", "mxfp4", "fp8", "bf16", "published"]),
    default=None,
    help="Format of the routed experts, for a bare config only. Default: what the config states, else nvfp4;"
    " published: what it states, else its dtype. A folder's own tensors decide.",
)
@click.option(
    "--dense-as",
    type=click.Choice(["nvfp4", "mxfp4", "fp8", "bf16"]),
    default=None,
    help="Format of the other linear layers, head included, routers not. Default: what the config states, else its"
    " dtype.",
)
def plan(path, experts_as, dense_as):
    """How many bytes does one token read?

    PATH is a checkpoint folder of the Nemotron-H family, or a bare config.json of any family that transformers knows:
    Mixtral, Qwen3-MoE, gpt-oss, DeepSeek, GLM, OLMoE ... The model is built without weights and counted by module;
    what an expert is, and how many a token uses, is seen from the model itself. Whether a model "fits in VRAM" is the
    wrong question when experts stream from disk; what counts is layers x top_k x expert_bytes, the bytes of routed
    experts that one token needs.

    \b
    expert_bytes             packed values and block scales of one expert, unpadded, without its scalars
    pages_per_expert         expert_bytes / 4096; not always whole
    bytes_per_token          MoE layers x top_k x expert_bytes
    dense_bytes              everything that is no routed expert, with embeddings, without MTP and vision
    active_params_per_token  top_k experts a layer and all the rest; of the embedding table one row
    groups                   MoE layers by kind of expert, where they differ

    Formats and their scales: nvfp4 has one byte for 16 values and 4 bytes a matrix, mxfp4 one byte for 32, fp8
    4 bytes a matrix, or for each block where the config states blocks. Where nobody can see what an expert is, the
    config may say so itself, in a section "nemolab"; the error shows how.

    \b
    Examples:
      nemolab plan
      nemolab plan /models/nemotron-super --json
      nemolab plan data/configs/nemotron-3-nano.json --experts-as bf16
      nemolab plan data/configs/qwen3-235b-a22b.json --experts-as nvfp4 --dense-as fp8
    """
    from nemolab.plan import plan as count

    result = count(path, experts_as, dense_as)
    return Answer(result.to_dict(), str(result))


@verb("inventory")
@checkpoint_argument
@click.option("--tensors", is_flag=True, help="List every tensor, not only the sums.")
def inventory(path, tensors):
    """What is in a checkpoint, and in which number format?

    Reads only the headers of the shards. The format of each module (nvfp4, fp8, bf16, f32) is found from its tensors;
    metadata that disagrees with them is reported, metadata that contradicts itself is refused. Sizes are bytes as
    stored. The second table says what becomes of every byte: used, kept in a store but not used (k_scale, v_scale),
    left out by name, or reported (tensors without a byte); unknown tensors that hold bytes are refused.

    \b
    Examples:
      nemolab inventory
      nemolab inventory /models/nemotron-super --tensors --json
    """
    from nemolab.checkpoint import Checkpoint, Inventory

    checkpoint = Checkpoint.open(path)
    listed = Inventory(checkpoint)
    sums = listed.by_format().reset_index()
    accounting = listed.accounting()
    data = {
        "tensors": int(sums["tensors"].sum()),
        "bytes": int(sums["bytes"].sum()),
        "sums": sums.to_dict("records"),
        "accounting": accounting.to_dict("records"),
        "file_bytes": listed.file_bytes(),
        "notes": list(checkpoint.notes),
    }
    blocks = [
        table(list(sums.columns), sums.values.tolist()),
        table(list(accounting.columns), accounting.values.tolist()),
        f"{data['tensors']:,} tensors, {data['bytes']:,} bytes ({show_bytes(data['bytes'])})",
    ]
    if tensors:
        frame = listed.frame()
        data["list"] = frame.to_dict("records")
        blocks.insert(0, table(list(frame.columns), frame.values.tolist()))
    blocks += [f"note: {note}" for note in checkpoint.notes]
    return Answer(data, "\n\n".join(blocks))
