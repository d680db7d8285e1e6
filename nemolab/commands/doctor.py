"""`nemolab doctor`: what this machine can do, with advice."""

import click

from nemolab.commands.verb import Answer, PathName, table, verb


@verb("doctor")
@click.option(
    "--store",
    type=PathName(),
    default=None,
    metavar="FOLDER",
    help="Look at the disk of this store, or of this folder to make one in; default: the cache folder.",
)
def doctor(store):
    """What can this machine do, and what is in the way?

    Looks at Python and the packages, the GPU and whether torch was built for it, the processor, memory and every
    limit on it (machine, all cgroups, ulimit) with the tightest one named, locked memory, and the place of stores: its
    file system, free space, and direct I/O by a real read: of the store that is there, else of a trial file of 6 MB,
    written and removed. Nothing else is changed, nothing is sent.

    Each check is ok, info (a fact), warn (works, but not as it should) or fail (something nemolab needs does not
    work). The exit code is 1 when a check fails, else 0: warnings do not count.

    --json: {"checks": [{"name", "status", "found", "expected", "advice"}], "ok", "memory": {"total_bytes",
    "available_bytes", "reserve_bytes", "room_bytes", "default_cache_bytes", "tightest", "limits", "notes"}, "store":
    {"folder", "exists", "file_system", "free_bytes", "mode", "reason", "memory_alignment_bytes",
    "offset_alignment_bytes"}}; mode is "direct" or "buffered", as verified, or null.

    \b
    Examples:
      nemolab doctor
      nemolab doctor --store /nvme/stores
      nemolab doctor --json
    """
    from nemolab.doctor import examine

    report = examine(store)
    rows = [[check.status, check.name, check.found] for check in report.checks]
    advice = [f"- {check.name}: {check.advice}" for check in report.checks if check.advice]
    text = table(["", "check", "found"], rows)
    if advice:
        text += "\n\nAdvice\n" + "\n".join(advice)
    failed = [f"{check.name}: {check.found}" for check in report.failures]
    return Answer(report.to_dict(), text, "; ".join(failed))
