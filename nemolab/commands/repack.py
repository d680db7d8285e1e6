"""`nemolab repack` and `nemolab verify`: a checkpoint into a store of whole-page blocks, and the proof."""

from pathlib import Path

import click

from nemolab.commands.verb import Answer, checkpoint_argument, progress_bar, settings, verb
from nemolab.units import show_bytes


@verb("repack")
@checkpoint_argument
@click.option("--to", "target", required=True, metavar="STORE", help="Folder to make. It must not exist yet.")
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
    pages, which O_DIRECT reads in one go. Streaming: memory stays small whatever the model's size. The manifest is
    written last, so an interrupted repack never looks like a store.

    \b
    Examples:
      nemolab repack --to /tmp/store
      nemolab repack /models/nemotron-super --to /nvme/super --layout neuron --json
    """
    from nemolab.store import repack as rewrite

    result = rewrite(path, Path(target).expanduser(), layout=layout, progress=progress_bar("repack"))
    data = {
        "blocks": result.blocks,
        "block_bytes": result.block_bytes,
        "bytes_written": result.bytes_written,
        "seconds": result.seconds,
        "direct_io": result.direct_io,
    }
    rate = result.bytes_written / result.seconds / 1e9 if result.seconds else 0.0
    text = (
        f"{result.blocks:,} blocks of {result.block_bytes:,} bytes: {show_bytes(result.bytes_written)} in "
        f"{result.seconds:.2f} s ({rate:.2f} GB/s), layout {layout}, "
        f"direct reads {'work' if result.direct_io else 'do not work'} there: {target}"
    )
    return Answer(data, text)


@verb("verify")
@click.argument("store", metavar="STORE")
@click.option("--source", default=None, metavar="PATH", help="The checkpoint it was made from: compare byte for byte.")
@click.option("--all", "every", is_flag=True, help="Every expert, not 200 spread over the store.")
def verify(store, source, every):
    """Are the blocks what they should be?

    With --source, experts are compared byte for byte with the checkpoint (200 of them, or --all); without it, blocks
    are re-read and compared with the checksums taken when the store was made. Exit code 1 when anything differs.

    \b
    Examples:
      nemolab verify /tmp/store
      nemolab verify /nvme/super --source /models/nemotron-super --all --json
    """
    from nemolab.store import verify as check

    result = check(
        Path(store).expanduser(),
        source=Path(source).expanduser() if source else None,
        all=every,
        progress=progress_bar("verify"),
    )
    against = f"against {source}" if source else "against the stored checksums"
    details = [str(detail) for detail in result.details]
    text = "\n".join([f"{result.checked:,} blocks checked {against}: {result.mismatches:,} differ", *details[:20]])
    problem = ""
    if result.mismatches:
        first = f": {details[0]}" if details and settings().as_json else ""
        problem = f"{result.mismatches} of {result.checked} blocks of {store} differ {against}{first}"
    return Answer({"checked": result.checked, "mismatches": result.mismatches, "details": details}, text, problem)
