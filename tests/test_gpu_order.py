"""The order between streams: no copy into memory on the card may begin before the kernels that read it last have ended.

Twins compute at once, so that a copy that comes too soon harms nothing there. So here it is not the bits that are
looked at, but what events say: each stream keeps how far it has come in itself and, by what it waited for, in others.
"""

import numpy as np
import pytest
from synthetic import one_thread, write_checkpoint

from nemolab.engine import Engine
from nemolab.engine.gpu.device import StandIn

SIZES = {"pattern": "MEEE*E", "experts": 12, "inter": 48, "latent": 32, "hidden": 48, "shared_inter": 32, "top_k": 3}
MAIN, COPIES = 0, 1


class Ordered(StandIn):
    """Streams and events that know their order. .now [stream]: (kernels of MAIN, copies) that come before it."""

    def __init__(self):
        super().__init__()
        self.now, self.read, self.written, self.copies = [[0, 0], [0, 0]], {}, {}, 0
        self.too_soon, self.late = [], 0
        real = self.locker.copy

        def copy(to, source, nbytes, stream):
            if stream == COPIES:
                self.copies += 1
                if self.read.get(to, 0) > self.now[COPIES][MAIN]:
                    self.too_soon.append(to)
                self.now[COPIES][COPIES] += 1
                self.written[to] = self.now[COPIES][COPIES]
            real(to, source, nbytes, 0)

        self.locker.copy = copy

    def compute_on(self, addresses):
        """A kernel on MAIN reads these."""
        self.now[MAIN][MAIN] += 1
        for address in addresses:
            self.late += self.written.get(address, 0) > self.now[MAIN][COPIES]
            self.read[address] = self.now[MAIN][MAIN]

    def main_stream(self):
        return _Stream(self, MAIN)

    def new_stream(self):
        return _Stream(self, COPIES)

    def new_event(self):
        return _Event()

    def copy(self, to, source, nbytes, stream=None):
        self.locker.copy(to, source, nbytes, stream.cuda_stream if stream else MAIN)


class _Stream:
    def __init__(self, device, number):
        self.device, self.cuda_stream = device, number

    def wait_event(self, event):
        mine = self.device.now[self.cuda_stream]
        mine[:] = np.maximum(mine, event.seen).tolist()

    def query(self):
        return True

    def synchronize(self):
        pass


class _Event:
    seen = (0, 0)

    def record(self, stream):
        self.seen = tuple(stream.device.now[stream.cuda_stream])

    def synchronize(self):
        pass


@pytest.mark.parametrize("transfer", ["whole", "rows", "pull"])
@one_thread
def test_copies_and_kernels_wait_for_each_other(tmp_path, monkeypatch, transfer):
    from nemolab.engine.gpu import prompt_experts

    device = Ordered()
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: device)
    monkeypatch.setattr(prompt_experts, "HALF_BLOCKS", 2)
    with Engine(write_checkpoint(tmp_path / "model", **SIZES), device="twin", transfer=transfer) as engine:
        model = engine._model
        step, operators = model._parts.step, model._prompts._operators
        real_bind, real_prompt = step._bind, operators.expert_prompt

        def bind(*arguments, **settings):
            bound = real_bind(*arguments, **settings)

            def launch(**settings):
                if transfer != "pull":
                    first = settings.get("first", 0)
                    device.compute_on(step._to[step._turn, first : first + settings["count"]].tolist())
                bound.launch(**settings)

            return type("Bound", (), {"launch": staticmethod(launch)})

        def expert_prompt(addresses, *others):
            device.compute_on(addresses.tolist())
            real_prompt(addresses, *others)

        monkeypatch.setattr(step, "_bind", bind)
        monkeypatch.setattr(model._prompts, "_operators", _Replaced(operators, expert_prompt))
        state = engine.new_state()
        engine.last_logits(range(40, 60), state)
        after_prompt = device.copies
        for token in range(60, 64):
            engine.step(token, state)
        assert after_prompt > 8 and (device.copies > after_prompt) == (transfer != "pull")
    assert not device.too_soon and not device.late


class _Replaced:
    def __init__(self, operators, expert_prompt):
        self.add_experts, self.expert_prompt = operators.add_experts, expert_prompt
