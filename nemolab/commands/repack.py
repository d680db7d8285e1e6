"""`nemolab repack` and `nemolab verify`: a checkpoint into a store of whole-page blocks, and the proof."""

from dataclasses import asdict

import click

from nemolab.commands.verb import Answer, PathName, checkpoint_argument, verb
from nemolab.progress import progress_bar
from nemolab.units import show_bytes


@verb("repack")
@checkpoint_argument
@click.option(
    "--to",
    "target",
    type=PathName(),
    required=True,
    metavar="STORE",
    help="Folder to make; what holds something else is left alone.",
)
@click.option(
    "--layout",
    type=click.Choice(["neuron", "source"]),
    default="neuron",
    show_default=True,
    help="neuron: down projection re-laid so that one neuron's values lie together; source: bytes as published.",
)
def repack(path, target, layout):
    """Rewrite the experts so that each is one aligned read.

    A published expert is spread over several tensors and shards. The store holds it as one block of whole 4096-byte
    pages, which O_DIRECT reads in one go. Streaming: memory stays small whatever the model's size.

    The manifest is written last, so an unfinished repack never looks like a store. Ctrl-C and errors remove what was
    written. After a kill or a power cut run the same command again: blocks that still check out are kept
    (resumed_blocks), the rest is made, and the store ends byte for byte as if nothing had happened. Another layout or
    a changed source in the same folder is refused. The space needed is checked and reserved before the work begins.

    A finished store whose files all have their sizes is left as it is; `nemolab verify` is what reads its bytes. To
    make a damaged one again, remove its folder first.

    \b
    Examples:
      nemolab repack --to /tmp/store
      nemolab repack /models/nemotron-super --to /nvme/super --layout neuron --json
    """
    from nemolab.store import repack as rewrite

    result = rewrite(path, target, layout=layout, progress=progress_bar("repack", "B"))
    written_gb_s = result.bytes_written / result.seconds / 1e9 if result.seconds else 0.0
    done = f"{show_bytes(result.bytes_written)} in {result.seconds:.2f} s ({written_gb_s:.2f} GB/s)"
    if result.resumed_blocks:
        done += f", {result.resumed_blocks:,} blocks kept from a run that was cut off"
    text = (
        f"{target}: {result.blocks:,} blocks of {result.block_bytes:,} bytes, layout {layout}; "
        f"{'it was complete already' if result.already_complete else done}; "
        f"written {'past' if result.direct_io else 'through'} the page cache"
    )
    return Answer(asdict(result) | {"written_gb_s": written_gb_s}, text)


@verb("verify")
@click.argument("store", type=PathName(), metavar="STORE")
@click.option(
    "--source",
    type=PathName(),
    default=None,
    metavar="PATH",
    help="The checkpoint it was made from: compare byte for byte.",
)
@click.option("--all", "every", is_flag=True, help="Every expert, not 200 spread over the store.")
def verify(store, source, every):
    """Are the blocks what they should be?

    With --source, experts are compared byte for byte with the checkpoint (200 of them, or --all), and so is the rest
    of the model; without it, everything is re-read and compared with the checksums taken when the store was made.
    checked counts blocks (experts), mismatches whatever differs or cannot be read; the rest is looked at all the same.
    Exit code 1 when anything does.

    \b
    Examples:
      nemolab verify /tmp/store
      nemolab verify /nvme/super --source /models/nemotron-super --all --json
    """
    from nemolab.store import verify as check

    result = check(
        store,
        source=source,
        all=every,
        progress=progress_bar("verify", " blocks"),
    )
    against = f"against {source}" if source else "against the stored checksums"
    lines = [f"{result.checked:,} blocks checked {against}; {result.mismatches:,} differences", *result.details[:20]]
    problem = ""
    if result.mismatches:
        problem = (
            f"{store}: {result.mismatches} differences {against}, the first: {result.details[0]};"
            " remove the folder and repack to make it anew"
        )
    return Answer(asdict(result), "\n".join(lines), problem)
