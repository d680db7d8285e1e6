"""The `nemolab` command: verbs for scripts and for long jobs. Each verb lives in `nemolab/commands/`.

Exit codes: 0 done; 1 bad input, a failed check, or a machine that lacks what was asked for (a card, memory); 2 bad
usage: words that are off on any machine; 130 interrupted. One line on stderr says why.
"""

import os
import sys
import traceback

import click

from nemolab import __version__
from nemolab.commands import bench, chat, compare, doctor, plan, repack, run, simulate, synth, trace
from nemolab.commands.verb import Settings, shared_options
from nemolab.errors import NemolabError, UsageError

# Nothing here needs the network, and no library should try it or chat about it on its own.
QUIET_LIBRARIES = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


class OrderedGroup(click.Group):
    """Lists its verbs in the order in which a newcomer meets them."""

    def list_commands(self, context):
        return list(self.commands)


@click.group(cls=OrderedGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nemolab")
@shared_options
@click.pass_context
def root(context):
    """Understand, measure and run mixture-of-experts models larger than the GPU.

    Verbs that read a checkpoint take its folder PATH (default: NEMOLAB_MODEL, else the small trained model that ships
    in data/tiny); all work from any folder, and answer in JSON with --json. GB is 10^9 bytes, GiB is 2^30 bytes.

    \b
    A first walk, each line a minute or less:
      nemolab doctor                       what this machine can do, with advice
      nemolab plan                         bytes one token reads, part by part
      nemolab repack --to /tmp/store       one block an expert, for direct reads
      nemolab verify /tmp/store            the blocks against their checksums
      nemolab compare                      the engine against transformers in fp32
      nemolab chat --prompt "Hello!"       an answer, experts read on demand
      nemolab run                          all notebooks and one HTML report
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# In the order in which a newcomer meets them. These modules import nothing heavy: `nemolab --help` must be quick.
for command in (
    doctor.doctor,
    plan.plan,
    plan.inventory,
    repack.repack,
    repack.verify,
    compare.compare,
    chat.chat,
    trace.trace,
    simulate.simulate,
    run.run,
    run.lab,
    bench.bench,
    synth.synth,
):
    root.add_command(command)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code; every way to fail becomes one clear line on stderr."""
    for name, value in QUIET_LIBRARIES.items():
        os.environ.setdefault(name, value)
    _open_closed_streams()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused where they are used
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Russian letters shows "?", it does not crash
    settings = Settings()
    try:
        result = root.main(arguments, prog_name="nemolab", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        # The reader of our output left (`| head`): quiet, as click is where it notices it first. Without this,
        # Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, click.Abort) as error:
        return _fail(settings, error, "interrupted", 130)
    except click.ClickException as error:
        hint = f"; see `{error.ctx.command_path} --help`" if getattr(error, "ctx", None) else ""
        return _fail(settings, error, error.format_message().rstrip(".") + hint, error.exit_code)
    except UsageError as error:
        return _fail(settings, error, str(error), 2)
    except NemolabError as error:
        return _fail(settings, error, str(error), 1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(settings, error, f"{error.strerror or error}{where}", 1)
    except MemoryError as error:
        return _fail(settings, error, "out of memory; ask for a smaller cache or close other programs", 1)
    except Exception as error:
        return _fail(settings, error, f"unexpected {type(error).__name__}: {error}; --debug shows where", 1)


def _open_closed_streams() -> None:
    """Streams that our caller closed (`>&-`) lead nowhere, instead of to the next file that is opened."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the process ends


def _fail(settings: Settings, error: BaseException, message: str, code: int) -> int:
    if settings.debug:
        traceback.print_exception(error)
    try:
        click.echo(f"nemolab: {' '.join(message.split())}", err=True)
    except BrokenPipeError:
        pass
    return code
