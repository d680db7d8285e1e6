"""`nemolab chat`: one answer, or a conversation in the terminal."""

import sys

import click

from nemolab.commands.verb import Answer, checkpoint_argument, settings, verb
from nemolab.errors import UsageError
from nemolab.units import Budget, parse_budget, show_bytes


def _budget(context, parameter, value) -> Budget | None:
    return None if value is None else parse_budget(value)


@verb("chat")
@checkpoint_argument
@click.option("--prompt", default=None, metavar="TEXT", help="Ask once. Without it: a conversation in the terminal.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Longest answer, in tokens."
)
@click.option("--think", is_flag=True, help="Let the model reason before it answers.")
@click.option(
    "--ram-cache",
    callback=_budget,
    metavar="SIZE|Nslots",
    help="RAM for experts: 4GiB, 500MiB, 2GB or 48slots (blocks). Default: the engine's choice.",
)
@click.option("--store", default=None, metavar="STORE", help="Use this store; else one is made in the cache folder.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is no limit.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sampling.")
def chat(path, prompt, max_tokens, think, ram_cache, store, temperature, top_p, top_k, seed):
    """Talk to a model whose experts are read on demand.

    Greedy and without reasoning unless asked otherwise. The answer's stats count lookups, hits, misses and bytes by
    phase (prefill: the prompt, decode: the answer). In a conversation, /quit or Ctrl-D leaves, /new starts afresh and
    Ctrl-C stops an answer.

    \b
    Examples:
      nemolab chat
      nemolab chat --prompt "What is the difference between TCP and UDP?" --max-tokens 200
      nemolab chat /models/nemotron-super --ram-cache 14GiB --think --json --prompt "Why is the sky blue?"
    """
    if prompt is None and settings().as_json:
        raise UsageError("chat --json answers one question: add --prompt TEXT")
    from nemolab.engine import Engine

    budget = ram_cache or Budget()
    ask = {
        "think": think,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    with Engine(path, ram_cache_gib=budget.gib, ram_cache_slots=budget.slots, store=store) as engine:
        if prompt is None:
            return _converse(engine, ask)
        result = engine.chat([{"role": "user", "content": prompt}], **ask)
    data = {
        "text": result.text,
        "reasoning": result.reasoning,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "stats": result.stats,
    }
    reasoning = f"[thinking] {result.reasoning}\n\n" if result.reasoning else ""
    return Answer(data, reasoning + result.text + "\n\n" + _footer(result))


def _converse(engine, ask: dict) -> Answer:
    raise NotImplementedError


def _footer(result) -> str:
    phases = []
    for phase in ("prefill", "decode"):
        counts = result.stats.get(phase, {})
        if counts.get("lookups"):
            phases.append(
                f"{phase}: {counts['hits']:,} of {counts['lookups']:,} experts from RAM, "
                f"{show_bytes(counts['bytes_read'])} read"
            )
    return f"[{result.prompt_tokens} + {result.completion_tokens} tokens; " + "; ".join(phases) + "]"


def is_terminal() -> bool:
    return sys.stdin.isatty()
