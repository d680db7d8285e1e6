"""`nemolab chat`: one answer, or a conversation in the terminal."""

import contextlib
import signal
import sys
from collections.abc import Iterator

import click

from nemolab.commands.device import cache_size, device_options, place, ram_cache_option
from nemolab.commands.verb import (
    Answer,
    checkpoint_argument,
    engine_path,
    sampling_options,
    settings,
    share_cores,
    store_option,
    verb,
)
from nemolab.errors import NemolabError, UsageError
from nemolab.progress import say
from nemolab.units import show_bytes


@verb("chat")
@checkpoint_argument
@click.option("--prompt", default=None, metavar="TEXT", help="Ask once. Without it: a conversation in the terminal.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer, in tokens."
)
@click.option("--think", is_flag=True, help="Let the model reason before it answers.")
@ram_cache_option
@click.option(
    "--prefetch", type=click.IntRange(min=0), default=0, show_default=True, help="Guesses read ahead a layer."
)
@device_options
@store_option
@sampling_options
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is no limit.")
def chat(
    path, prompt, max_tokens, think, ram_cache, prefetch, device, transfer, vram, store, temperature, top_p, top_k, seed
):
    """Talk to a model whose experts are read on demand.

    Greedy and without reasoning unless asked otherwise. The answer's stats count lookups, hits, misses and bytes by
    phase (prefill: the prompt, decode: the answer). How much RAM the experts take is held against what the machine,
    every cgroup and ulimit leave, and said on stderr; --json has it in `memory`, with the peak. In a conversation,
    /quit or Ctrl-D leaves, /new starts afresh and Ctrl-C stops an answer.

    \b
    Examples:
      nemolab chat
      nemolab chat --prompt "What is the difference between TCP and UDP?" --max-tokens 200
      nemolab chat /models/nemotron-super --ram-cache 14GiB --think --json --prompt "Why is the sky blue?"
      nemolab chat /models/nemotron-3.5-super --device cuda --vram 8GiB --ram-cache 16GiB --prefetch 4
    """
    if prompt is None and settings().as_json:
        raise UsageError("chat --json answers one question: add --prompt TEXT")
    where = place(device, transfer, vram)
    share_cores()
    from nemolab.engine import Engine

    ask = {
        "think": think,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    path = engine_path(path, store)
    with Engine(path, store=store, prefetch=prefetch, **cache_size(ram_cache), **where) as engine:
        for note in engine.notes:
            say(f"note: {note}")
        say(engine.budget.line())
        if prompt is None:
            Conversation(engine, ask).run()
            return Answer({})
        messages = [{"role": "user", "content": prompt}]
        if settings().as_json:
            result = engine.chat(messages, **ask)
        else:
            result = write_answer(engine.chat(messages, stream=True, **ask))
        memory = engine.memory()
    data = {**{name: getattr(result, name) for name in RESULT}, "memory": memory}
    return Answer(data, footer(result, memory["peak_rss_bytes"]))


RESULT = ("text", "reasoning", "prompt_tokens", "completion_tokens", "finish_reason", "stats")


class Conversation:
    """Lines in, answers out, until /quit or the end of the input."""

    def __init__(self, engine, ask: dict):
        self.engine, self.ask = engine, ask
        self.messages: list[dict] = []

    def run(self) -> None:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            say("/quit or Ctrl-D leaves, /new starts afresh, Ctrl-C stops an answer")
        while (line := self._read()) is not None:
            word = line.strip()
            if word in ("/quit", "/exit"):
                return
            if word == "/new":
                self.messages.clear()
                say("a new conversation")
            elif word.startswith("/"):
                say(f"no such command: {word.split()[0]}; there are /quit and /new")
            elif word:
                self._answer(line)

    def _read(self) -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            click.echo()
            return None

    def _answer(self, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            with _interruptible() as interrupted:
                result = write_answer(self.engine.chat(messages, stream=True, **self.ask), interrupted)
        except NemolabError as error:  # most likely too long: the conversation so far is still good
            say(f"{error}; /new starts afresh")
            return
        say(footer(result, self.engine.memory()["peak_rss_bytes"]) if result.stats else "[stopped]")
        self.messages = [*messages, {"role": "assistant", "content": result.text}]


def write_answer(pieces: Iterator, interrupted: list | None = None):
    """Write an answer as it grows, reasoning set apart; returns the result, what there was of it when interrupted."""
    from nemolab.engine import ChatResult

    text = reasoning = ""
    for piece in pieces:
        if piece.result is not None:
            click.echo("\n" if text else "")
            return piece.result
        if piece.reasoning:
            click.echo(piece.reasoning if reasoning else f"[thinking] {piece.reasoning}", nl=False)
        if piece.text:
            click.echo(piece.text if text or not reasoning else f"\n[answer] {piece.text}", nl=False)
        text, reasoning = text + piece.text, reasoning + piece.reasoning
        if interrupted:
            break
    click.echo()
    return ChatResult(text, reasoning, 0, 0, "interrupted", {})


@contextlib.contextmanager
def _interruptible() -> Iterator[list]:
    """The first Ctrl-C fills the list, so that an answer stops between two tokens; the second one is an interrupt."""
    interrupted: list = []

    def on_interrupt(number, frame):
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def footer(result, peak_rss_bytes: int) -> str:
    """Tokens, speed, where the experts came from and the most memory taken so far, in one line."""
    facts = [f"{result.prompt_tokens} + {result.completion_tokens} tokens"]
    for phase, counts in result.stats.items():
        if counts.get("lookups"):
            share = counts["hits"] / counts["lookups"]
            facts.append(
                f"{phase} {counts['tok_s']:.1f} tok/s, {share:.0%} of {counts['lookups']:,} experts from RAM, "
                f"{show_bytes(counts['bytes_read'])} read"
            )
    facts.append(f"{show_bytes(peak_rss_bytes)} of memory at most")
    return f"[{'; '.join(facts)}]"
