"""What is fed to an engine, checked before a pass begins: token ids and the state they continue."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import numpy as np
import torch

from nemolab.engine.state import Mark, State
from nemolab.errors import EngineError

_SHOWN_BITS = 64  # of a number; Python does not write out those of thousands of digits


def check_ids(ids: Any, config) -> torch.Tensor:
    """Token ids as int64 [tokens], one or more, on the CPU: of a list or so, a numpy array or a tensor.

    Raises EngineError for what is no whole number of the vocabulary.
    """
    if isinstance(ids, torch.Tensor | np.ndarray):
        if ids.ndim != 1:
            raise EngineError(f"token ids of shape {list(ids.shape)}; {_needed('in a list')}")
        ids = ids.tolist()
    elif isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
        raise EngineError(f"token ids are {show(ids)}; {_needed('in a list')}")
    numbers = [_whole(each) for each in ids]
    if not numbers:
        raise EngineError("token ids of shape [0]; a list of one or more is needed")
    low, high = min(numbers), max(numbers)
    if low < 0 or high >= config.vocab_size:
        found = f"from {show(low)} to {show(high)}"
        raise EngineError(f"token ids {found}; the vocabulary is 0 to {config.vocab_size - 1}")
    return torch.tensor(numbers, dtype=torch.int64)


def check_id(token_id: Any, config) -> int:
    """The same for one."""
    number = _whole(token_id)
    if not 0 <= number < config.vocab_size:
        raise EngineError(f"token id {show(number)}; the vocabulary is 0 to {config.vocab_size - 1}")
    return number


def _whole(value: Any) -> int:
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise EngineError(f"{show(value)} among token ids; {_needed('in a list')}") from None


def _needed(form: str) -> str:
    return f"whole numbers {form} are needed"


def show(value: Any) -> str:
    """A value that should have been another, for an error: not more than a line of it."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)


def check_length(prompt_tokens: int, max_tokens: int, state: State | None, config) -> None:
    """Raises EngineError for more tokens than the model was made for, those in the state counted."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
        raise EngineError(f"max_tokens is {max_tokens!r}; a whole number is needed")
    before = state.tokens if state is not None else 0
    limit = config.max_position_embeddings
    if before + prompt_tokens + max_tokens > limit:
        held = f"{before} in the conversation + " if before else ""
        raise EngineError(
            f"{held}{prompt_tokens} prompt + {max_tokens} new tokens are more than the {limit} this model was made for"
        )


def check_state(state: Any, mark: Mark, new_too: bool = False) -> None:
    """Raises EngineError for what is no state of this model in this place; new_too  None stands for a new one."""
    if state is None and new_too:
        return
    if not isinstance(state, State):
        raise EngineError(f"the state is {show(state)}; one that this engine's new_state() made is needed")
    if state.mark == mark:
        return
    if state.mark is None:
        found, wanted = "no engine's", "one of this engine's new_state()"
    elif state.mark.place != mark.place:
        found, wanted = f"an engine's on {state.mark.place}", f"one on {mark.place}"
    else:
        found, wanted = f"of model {state.mark.model[:12]}", f"one of model {mark.model[:12]}, the same weights,"
    raise EngineError(f"this state is {found}; {wanted} is needed, and what it holds is to be fed to a new one")
