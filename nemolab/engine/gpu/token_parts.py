"""What the MoE layers of a model share while a token goes through them: buffers, guesses, forced choices, recording."""

from __future__ import annotations

import numpy as np
import torch

from nemolab.engine.gpu.moe_step import MoeStep
from nemolab.engine.gpu.pinned import UNKNOWN, PinnedArray, wait_for_ids
from nemolab.engine.gpu.segments import Branch, Segments
from nemolab.errors import EngineError
from nemolab.trace import Recorder


class TokenParts:
    """Shared between layers, since one is done with them before the next begins, and set between tokens.

    .step        the MoeStep; .segments  the Segments, whose graphs touch all these
    .h, .logits  float32 [hidden], [experts]; .router  of a layer's own experts
    .shared_first  the shared expert comes before the router, not behind the choice; .branch  where it runs else
    .guesses     a Guesses, .forced a ForcedRouting, .record a RecordQueue, each or None
    make_locked  makes what page-locks memory: see `ExpertFetcher.make_locked`
    """

    def __init__(self, config, step: MoeStep, segments: Segments, make_locked, device, operators):
        self.step, self.segments, self.shared_first = step, segments, False
        self.branch = Branch(device)
        self._config, self._make_locked, self._device, self._operators = (
            config,
            make_locked,
            device,
            operators,
        )
        self.limits = (config.n_group, config.topk_group)
        self.routing = (config.top_k, *self.limits, config.norm_topk_prob, config.routed_scaling_factor)
        there = device.torch_device
        self.router = operators.RouterStep(config.n_experts, *self.routing, there)
        self.h, self.logits = (torch.empty(size, device=there) for size in (config.hidden_size, config.n_experts))
        self.guesses: Guesses | None = None
        self.forced: ForcedRouting | None = None
        self.record: RecordQueue | None = None

    @property
    def n_layers(self) -> int:
        return self.step.table.host.shape[0]

    def guess(self, count: int) -> None:
        """Let layers guess so many experts of the next one, 0: none."""
        if count == (self.guesses.count if self.guesses else 0):
            return
        parts = (self, count, self._config, self._device, self._operators)
        self._replace("guesses", self._make_locked("guesses", lambda: Guesses(*parts)) if count else None)

    def force(self, chosen: np.ndarray | None, guesses: np.ndarray | None) -> None:
        """See `ForcedRouting`; None: no more."""
        if chosen is None:
            if guesses is not None:
                raise EngineError("guesses alone cannot be forced: give the experts chosen, too")
            if self.forced is not None:
                self._replace("forced", None)
            return
        checked = _check_forced("chosen", chosen, self.n_layers, self._config.n_experts, self._config.top_k)
        if guesses is not None:
            checked = np.hstack([checked, _check_forced("guesses", guesses, self.n_layers, self._config.n_experts)])
        if self.forced is None or self.forced.shape != checked.shape:
            parts = (checked.shape, self._config.top_k, self._device)
            self._replace("forced", self._make_locked("forced choices", lambda: ForcedRouting(*parts)))
        self.forced.told.array[:] = checked

    def queue_record_by(self, recorder: Recorder | None) -> None:
        """Let a recorder be told what layers do, or (None) nobody."""
        parts = (recorder, self.n_layers, self._config.hidden_size, self.step, self._device)
        self._replace("record", self._make_locked("a recording", lambda: RecordQueue(*parts)) if recorder else None)

    def _replace(self, name: str, part) -> None:
        """What was recorded as a graph touches the part that was, and so may the card."""
        self.segments.drop()
        old = getattr(self, name)
        if old is not None:
            self._device.wait()  # first: an interrupt must not let go of what the card may be at
        setattr(self, name, part)
        if old is not None:
            old.close()

    def close(self) -> None:
        """Closing twice is fine."""
        for name in ("guesses", "forced", "record"):
            self._replace(name, None)


class Guesses:
    """What layers guess of the next one's experts, on the card and, told with each layer's choice, here.

    .ids  int32 [count] on the card, what `.router` writes there
    """

    def __init__(self, parts: TokenParts, count: int, config, device, operators):
        self.count, self._device = count, device
        there = device.torch_device
        self._router = operators.RouterStep(config.n_experts, count, *parts.routing[1:], there)
        self.ids = torch.empty(count, dtype=torch.int32, device=there)
        self._weights = torch.empty(count, device=there)
        self._told = PinnedArray((parts.n_layers, count), np.int32, device.locker)

    def choose(self, logits: torch.Tensor, bias: torch.Tensor) -> None:
        self._router.run(logits, bias, self.ids, self._weights)

    def expect(self, layer: int) -> None:
        """Before a layer's work is queued or replayed."""
        self._told.array[layer] = UNKNOWN

    def tell(self, layer: int) -> None:
        """Queue their way to the CPU."""
        self._device.copy(self._told.address + 4 * self.count * layer, self.ids.data_ptr(), 4 * self.count)

    def learn(self, layer: int) -> np.ndarray:
        """Those made in a layer, int32 [count] by rank; waits for the card. Raises EngineError where it tells none."""
        told = self._told.array[layer]
        if not wait_for_ids(told, self._device.main_stream().query):
            raise EngineError(f"the card did not tell what layer {layer} guesses; it may have failed")
        return told

    def close(self) -> None:
        self._told.close()


class ForcedRouting:
    """Choices that take the place of the routers': for benchmarks, whose model may route like nobody's.

    .told  int32 [layers, top_k + guesses]: by layer and rank what is chosen, then what is guessed for the layer behind
    """

    def __init__(self, shape: tuple[int, int], top_k: int, device):
        self.shape, self._top_k, self._device = shape, top_k, device
        self.told = PinnedArray(shape, np.int32, device.locker)
        self._there = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)

    def send(self) -> None:
        """Queue the way of a token's choices to the card, before its first layer."""
        self._device.copy(self._there.data_ptr(), self.told.address, self.told.nbytes)

    def put_choice(self, layer: int, ids: torch.Tensor) -> None:
        """Queue: this is what the layer chose."""
        ids.copy_(self._there[layer, : ids.numel()])

    def put_guesses(self, layer: int, ids: torch.Tensor) -> None:
        """Queue: this is what it guesses; ranks beyond those given stay as they are."""
        given = self._there[layer, self._top_k :][: ids.numel()]
        ids[: given.numel()].copy_(given)

    def close(self) -> None:
        self.told.close()


def _check_forced(name: str, ids, layers: int, n_experts: int, count: int | None = None) -> np.ndarray:
    """As int32. Raises EngineError for another shape, ids that are none, and an id twice in a layer."""
    try:
        ids = np.asarray(ids)
    except (ValueError, TypeError) as problem:  # rows of several lengths, tensors of a card
        raise EngineError(f"experts {name} are no array ({problem}); whole numbers are needed") from None
    fits = ids.ndim == 2 and ids.shape[0] == layers and (count is None or ids.shape[1] == count)
    if not fits or not np.issubdtype(ids.dtype, np.integer):
        wanted = f"[{layers}, {count or 'any'}]"
        raise EngineError(f"experts {name} of shape {list(ids.shape)}, {ids.dtype}; whole numbers {wanted} are needed")
    ordered = np.sort(ids if count else ids[:-1], axis=1)  # the last layer guesses for nobody
    if ordered.size and (ordered.min() < 0 or ordered.max() >= n_experts or (np.diff(ordered, axis=1) == 0).any()):
        raise EngineError(f"experts {name}: ids of a layer must differ and lie between 0 and {n_experts - 1}")
    return ids.astype(np.int32)


class RecordQueue:
    """What a recorder is told of a token: copied in the order of the stream, handed over when the token is done.

    So recording waits for nothing that the token does not wait for anyway.
    """

    def __init__(self, recorder: Recorder, layers: int, hidden: int, step: MoeStep, device):
        self._recorder, self._step, self._device = recorder, step, device
        self._h = PinnedArray((layers, hidden), np.float32, device.locker)
        self._weights = PinnedArray((layers, step.top_k), np.float32, device.locker)
        self._active = PinnedArray((layers, *step.step.active.shape), np.int32, device.locker)
        self._noted: list[tuple] = []

    def begin(self) -> None:
        self._noted = []

    def queue(self, layer: int, h: torch.Tensor) -> None:
        """Once a layer's experts are computed: copies of its input, weights and active neurons."""
        step = self._step
        for pinned, tensor in ((self._h, h), (self._weights, step.weights), (self._active, step.step.active)):
            size = pinned.nbytes // pinned.array.shape[0]
            self._device.copy(pinned.address + layer * size, tensor.data_ptr(), size)

    def note(self, experts: list[int], missed: int, guesses: np.ndarray | None) -> None:
        """A layer's choice, by rank; the blocks it read on demand; the guesses made in it for the next one."""
        self._noted.append((np.array(experts, np.int32), missed, None if guesses is None else guesses.copy()))

    def hand_over(self) -> None:
        """Tell it all, the card being done with the token."""
        weights = self._weights.array.copy()
        active = self._active.array.view(np.uint16)[..., ::2]  # 16 neurons each: the low halves
        for layer, (experts, missed, guesses) in enumerate(self._noted):
            self._recorder.decode_layer(
                layer, self._h.array[layer], experts, weights[layer], active[layer], missed, guesses
            )

    def close(self) -> None:
        for pinned in (self._h, self._weights, self._active):
            pinned.close()
