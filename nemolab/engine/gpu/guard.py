"""A pass over the layers on a card, with the card's memory watched before, meanwhile and after."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from nemolab.errors import EngineError

Result = TypeVar("Result")


class Guard:
    """Runs passes. Memory that does not suffice is an error of ours, and what the pass had taken is given back."""

    def __init__(self, device):
        self._device = device

    def run(self, tokens: int, behind: int, compute: Callable[[], Result]) -> Result:
        """What `compute` returns: a pass of so many tokens behind so many. Raises EngineError where memory ends."""
        try:
            return compute()
        except torch.OutOfMemoryError as problem:
            said = str(problem).split(". ")[0]
            # Whoever keeps the error (a notebook does) would keep every tensor of the frames it came through.
            traceback.clear_frames(problem.__traceback__)
        what = "a token" if tokens == 1 else f"a pass of {tokens} tokens"
        raise EngineError(f"the card's memory does not suffice for {what} behind {behind}: {said}")
