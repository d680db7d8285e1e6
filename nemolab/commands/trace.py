"""`nemolab trace`: record what a model routed while it answered."""

import shlex
from typing import Any

import click

from nemolab.commands.device import cache_size, device_options, place, ram_cache_option
from nemolab.commands.verb import (
    Answer,
    PathName,
    checkpoint_argument,
    engine_path,
    sampling_options,
    share_cores,
    store_option,
    table,
    verb,
)
from nemolab.errors import UsageError
from nemolab.progress import progress_bar, say
from nemolab.units import show_bytes

COLUMNS = ("tokens", "lookups", "hits", "misses", "hit_rate", "reads_per_token", "bytes_per_token")


@verb("trace")
@checkpoint_argument
@click.option("--prompts", type=PathName(), metavar="FILE", help="Conversations: JSON lines, each a list of messages.")
@click.option("--texts", type=PathName(), metavar="DIR", help="Or: the .txt files of a folder, fed token by token.")
@click.option("--to", type=PathName(), required=True, metavar="FILE", help="The trace to write (safetensors).")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Longest answer, in tokens (default 256); with --texts, tokens fed of each (default all).",
)
@ram_cache_option
@click.option(
    "--prefetch", type=click.IntRange(min=0), default=0, show_default=True, help="Guesses read ahead a layer."
)
@click.option("--policy", default="lru", show_default=True, metavar="NAME", help="Who leaves the cache.")
@device_options
@click.option("--think", is_flag=True, help="Let the model reason before it answers.")
@sampling_options
@click.option("--token-ids/--no-token-ids", default=True, help="Keep what was fed, so that it can be fed again.")
@store_option
def trace(
    path, prompts, texts, to, max_tokens, ram_cache, prefetch, policy, device, transfer, vram,
    think, temperature, top_p, seed, token_ids, store,
):  # fmt: skip
    """Record what the model routes while it answers, for `nemolab simulate`.

    Written down for every token and MoE layer: the experts in rank order and their weights, what the routers of the
    next three layers would have guessed, how many neurons and groups were active, which phase, conversation and
    position it was, and how many blocks were read on demand. The answer counts the same by phase (prefill: prompts,
    decode: answers), as the engine's own cache did, so that a replay can be held against it.

    A line of --prompts is a list of messages, or {"messages": [...], "name": "..."}. Every user message without an
    assistant message behind it is answered in turn, so that several in a row are a scripted conversation. Each
    conversation begins with a state of its own; the cache is carried on. The n-th answer is sampled with SEED + n.
    With --texts each file is a conversation as if the model had written it: one token is the prompt, the rest decode.

    A trace holds the ids of all tokens, and so the text of the conversations; --no-token-ids leaves them out.

    \b
    Examples:
      nemolab trace --prompts data/traces/prompts.jsonl --to my.safetensors --temperature 0.8 --ram-cache 96slots
      nemolab trace --texts data/texts --to texts.safetensors --ram-cache 4MiB --prefetch 4 --json
      nemolab simulate my.safetensors --budget 2MiB,4MiB --policy lru,belady
    """
    if (prompts is None) == (texts is None):
        raise UsageError("give either --prompts FILE or --texts DIR")
    if texts is not None and (think or temperature or top_p != 1 or seed):
        raise UsageError("--think, --temperature, --top-p and --seed are for answers; with --texts nothing is sampled")
    where = place(device, transfer, vram)
    share_cores()
    from nemolab.engine import Engine
    from nemolab.engine.conversations import record_chats, record_texts, summarise
    from nemolab.engine.scripts import read_prompts, read_texts
    from nemolab.policy import POLICIES
    from nemolab.trace import check_target, write_trace

    online = [name for name, known in POLICIES.items() if not known.future]
    if policy not in online:
        raise UsageError(f"--policy {policy!r}: an engine's cache runs {', '.join(online)}")
    check_target(to)
    work = read_prompts(prompts) if prompts is not None else read_texts(texts)
    cache = {"prefetch": prefetch, "policy": policy, **cache_size(ram_cache)}
    model = engine_path(path, store)
    with Engine(model, store=store, **cache, **where) as engine:
        for note in engine.notes:
            say(f"note: {note}")
        say(engine.budget.line())
        keep = {"token_ids": token_ids, "progress": progress_bar("trace", "tokens")}
        if prompts is not None:
            sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
            made = record_chats(engine, work, max_tokens=max_tokens or 256, think=think, **sampling, **keep)
        else:
            made = record_texts(engine, work, max_tokens=max_tokens, **keep)
    file_bytes = write_trace(to, made)
    data = {"path": str(model or store), "to": str(to), "file_bytes": file_bytes, **summarise(made)}
    return Answer(data, describe(data, len(work)))


def describe(data: dict[str, Any], asked: int) -> str:
    """What was recorded, what the cache did meanwhile, and what to do with it."""
    tokens, cache, count = data["tokens"], data["cache"], data["conversations"]
    head = (
        f"{data['to']}: {tokens['prefill']:,} + {tokens['decode']:,} tokens of {data['model']} in "
        f"{count} conversation{'s' if count > 1 else ''}, {show_bytes(data['file_bytes'])}"
    )
    if count > asked:
        head += f" ({asked} were asked for: where a template takes back what it showed, the model begins anew)"
    rows = [[phase, *(counts.get(name) for name in COLUMNS)] for phase, counts in data["stats"].items()]
    lines = [head, "", table(["phase", *(name.replace("_", " ") for name in COLUMNS)], rows), ""]
    slots = cache["slots"]
    sizes = ",".join(f"{size}slots" for size in (max(1, slots // 2), slots, 2 * slots))
    lines.append(f"cache: {cache['policy']}, {slots:,} blocks ({show_bytes(cache['budget_bytes'])}), as it was live")
    lines.append(f"next:  nemolab simulate {shlex.quote(data['to'])} --budget {sizes} --policy lru,belady")
    return "\n".join(lines)
