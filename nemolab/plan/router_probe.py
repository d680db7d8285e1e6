"""How many experts a token uses, found by running a MoE block on the meta device and watching what it does.

No field of a config is believed: two tokens without values go in, and we see the indices that the experts are handed,
or the top-k that the router takes over as many scores as there are experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

TOKENS = 2


@dataclass(frozen=True)
class Routing:
    """top_k of `scored` experts for each token; `width`: columns of what the experts were given, None if unseen."""

    top_k: int
    scored: int
    width: int | None


@dataclass
class _Seen:
    """What a run showed: (k, over how many) of every choice, and the calls of experts as (top_k or None, width)."""

    choices: list[tuple[int, int]] = field(default_factory=list)
    highest: list[int] = field(default_factory=list)
    calls: list[tuple[int | None, int | None]] = field(default_factory=list)


def probe_block(
    block: nn.Module, experts: Iterable[nn.Module], count: int, widths: Iterable[int], routers: Iterable[nn.Module]
) -> Routing | None:
    """Run a MoE block, or failing that its router alone, and see how many of `count` experts it chooses; None: unseen.

    experts  the modules that hold the weights of the experts: replaced by listeners for the time of the run
    widths   widths of the hidden state to try
    routers  modules to try alone where the block cannot be run by itself, because it is a whole layer
    """
    experts, seen = list(experts), _Seen()
    for module in (block, *routers):
        for width in dict.fromkeys(widths):
            for shape in ((1, TOKENS, width), (TOKENS, width)):
                seen = _run(module, experts, lambda module, shape=shape: _call(module, shape))
                if routing := _read(seen, count):
                    return routing
    return None


def probe_model(model: nn.Module, places: dict[str, tuple[list[nn.Module], int]]) -> dict[str, Routing]:
    """The same by one run of the whole model on two token ids, where no block would run by itself.

    places  name -> (modules that hold its experts, how many those are); only places that were seen are in the answer
    """
    import torch

    choices, seen = _Seen(), {name: _Seen() for name in places}
    with ExitStack() as stack:
        for name, (holders, _) in places.items():
            for holder in holders:
                stack.enter_context(_listening(holder, seen[name]))
        for context in (torch.no_grad(), torch.device("meta"), _Choices(choices)):
            stack.enter_context(context)
        try:
            model(input_ids=_ids(), use_cache=False)
        except Exception:  # as in _run
            pass
    found = {}
    for name, (_, count) in places.items():
        seen[name].choices = choices.choices
        if seen[name].calls and (routing := _read(seen[name], count)):
            found[name] = routing
    return found


def _read(seen: _Seen, count: int) -> Routing | None:
    """The last choice among at least `count` is the one between experts: groups are chosen before, from fewer."""
    width = next((width for _, width in seen.calls if width), None)
    handed = next((k for k, _ in seen.calls if k), None)
    if handed:
        # More may be scored than have weights: zero-compute experts.
        over = next((over for k, over in reversed(seen.choices) if k == handed and over >= count), count)
        return Routing(handed, over, width)
    chosen = [k for k, over in seen.choices if over == count]
    if chosen:
        return Routing(chosen[-1], count, width)
    # Routers of the top one or two take the highest score once or twice instead.
    times = sum(over == count for over in seen.highest)
    return Routing(times, count, width) if times else None


def _run(module: nn.Module, experts: list[nn.Module], call: Callable[[nn.Module], Any]) -> _Seen:
    """Call a module that may fail half way, on tensors without values; what was seen until then counts."""
    import torch

    seen = _Seen()
    with ExitStack() as stack:
        for expert in experts:
            stack.enter_context(_listening(expert, seen))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_Choices(seen))
        try:
            call(module)
        except Exception:  # whatever a foreign forward() needs that we do not give, or that needs values
            pass
    return seen


def _call(module: nn.Module, shape: tuple[int, ...]) -> Any:
    import torch

    hidden = torch.empty(shape, dtype=torch.bfloat16)
    accepted = inspect.signature(module.forward).parameters
    return module(hidden, **({"input_ids": _ids()} if "input_ids" in accepted else {}))


def _ids() -> torch.Tensor:
    import torch

    return torch.zeros((1, TOKENS), dtype=torch.long)


@contextmanager
def _listening(expert: nn.Module, seen: _Seen) -> Iterator[None]:
    """Let a module of experts tell what it is given instead of computing: that would need values."""

    def listen(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if hasattr(value, "is_floating_point")]
        hidden = next((value for value in tensors if value.is_floating_point()), None)
        index = next((value for value in tensors if not value.is_floating_point() and value.dim() >= 2), None)
        seen.calls.append(
            (None if index is None else int(index.shape[-1]), None if hidden is None else int(hidden.shape[-1]))
        )
        return hidden

    expert.forward = listen
    try:
        yield
    finally:
        del expert.forward


def _Choices(seen: _Seen) -> Any:
    """A context in which every top-k, and every search for the highest, is noted."""
    import torch
    from torch.overrides import TorchFunctionMode

    top = {torch.topk, torch.Tensor.topk}
    highest = {torch.argmax, torch.Tensor.argmax}

    class Choices(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function in top:
                scores, k = args[0] if args else kwargs["input"], kwargs.get("k", args[1] if len(args) > 1 else 1)
                dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
                seen.choices.append((int(k), int(scores.shape[dim])))
            elif function in highest and (len(args) > 1 or "dim" in kwargs):
                dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
                if isinstance(dim, int):
                    seen.highest.append(int(args[0].shape[dim]))
            return function(*args, **kwargs)

    return Choices()
