"""What kernels' launchers refuse: tensors of another type, shape, layout or device, before anything is launched."""

import pytest
import torch

from nemolab.errors import EngineError
from nemolab.kernels.gpu.attention_step import AttentionStep
from nemolab.kernels.gpu.combine import Combine
from nemolab.kernels.gpu.mamba_prompt import MambaPrompt
from nemolab.kernels.gpu.mamba_step import MambaStep
from nemolab.kernels.gpu.matvec import matvec
from nemolab.kernels.gpu.rms_norm import rms_norm
from nemolab.kernels.gpu.router_step import RouterStep
from nemolab.kernels.matvec import pack

# 4 heads of 8 rows in 2 groups, a state of 6: 32 inner values, 32 + 2 * 2 * 6 = 56 channels, 3 taps.
WEIGHTS = {"conv_weight": (56, 3), "conv_bias": (56,), "a": (4,), "d": (4,), "dt_bias": (4,), "norm": (32,)}


def floats(**shapes):
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def ints(*names, count):
    return {name: torch.zeros(count, dtype=torch.int32) for name in names}


def mixer(kind=MambaStep, **weights):
    return kind(**(floats(**WEIGHTS) | weights), dt_limit=(0.0, 1.0), groups=2, eps=1e-5)


# Each launcher as a function of its tensors, and tensors that fit.
LAUNCHERS = {
    "norm": (lambda x, weight, y: rms_norm(x, weight, 1e-5, y), floats(x=(2, 32), weight=(32,), y=(2, 32))),
    "mixer": (mixer, floats(**WEIGHTS)),
    "prompt mixer": (lambda **weights: mixer(MambaPrompt, **weights), floats(**WEIGHTS)),
    "mamba step": (
        lambda **tensors: mixer().run(**tensors),
        floats(projected=(92,), conv_state=(56, 2), ssm=(4, 8, 6), y=(32,)),
    ),
    "scan": (
        lambda **tensors: mixer(MambaPrompt).scan(**tensors),
        floats(convolved=(5, 56), dt=(5, 4), ssm=(4, 8, 6)),
    ),
    "convolve": (lambda inputs: mixer(MambaPrompt).convolve(inputs), floats(inputs=(7, 56))),
    "gate": (
        lambda **tensors: mixer(MambaPrompt).gate(**tensors),
        floats(y=(5, 32), gate=(5, 32)) | {"out": torch.zeros(5, 32, dtype=torch.bfloat16)},
    ),
    "router": (
        lambda **tensors: RouterStep(16, 4, 1, 1, True, 1.0, "cpu").run(**tensors),
        floats(logits=(16,), bias=(16,), weights=(4,)) | ints("experts", count=4),
    ),
    "attention": (
        lambda **tensors: AttentionStep(4, 2, 8, 20, "cpu").run(**tensors),
        floats(q=(32,), k=(16,), v=(16,), keys=(20, 16), values=(20, 16), mixed=(32,)) | ints("tokens", count=1),
    ),
    "product": (
        lambda x, y: matvec(pack("bf16", 8, 16, torch.zeros(8, 16, dtype=torch.bfloat16)), x, y),
        floats(x=(16,), y=(8,)),
    ),
    "sum": (
        lambda **tensors: Combine(3, 2, 16).bind(**tensors),
        floats(partial=(3, 2, 16), weights=(3,), scales_2=(9, 2), out=(16,)) | ints("ids", count=3),
    ),
}
HARMS = {
    "type": lambda tensor: tensor.double(),
    "shape": lambda tensor: tensor[..., 1:].contiguous(),
    "layout": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "device": lambda tensor: tensor.to("meta"),
}
# What may have any size, and others have to fit it.
FREE = {("norm", "x")} | {(kind, name) for kind in ("mixer", "prompt mixer") for name in ("norm", "conv_weight")}


def cases():
    for launcher, (_, tensors) in LAUNCHERS.items():
        for name, tensor in tensors.items():
            for harm in HARMS:
                any_size = harm == "shape" and (launcher, name) in FREE
                if not (any_size or harm == "layout" and tensor.numel() == 1):
                    yield pytest.param(launcher, name, harm, id=f"{launcher}-{name}-{harm}")


@pytest.mark.parametrize(("launcher", "name", "harm"), list(cases()))
def test_a_launcher_refuses_a_tensor_that_does_not_fit(launcher, name, harm):
    launch, tensors = LAUNCHERS[launcher]
    harmed = tensors | {name: HARMS[harm](tensors[name])}
    # Where the harmed tensor says what the others have to fit, it is one of these that is named.
    named = name if harm in ("type", "layout") else r"\w+"
    with pytest.raises(EngineError, match=rf"\b{named} is torch\.\w+ \[.*; contiguous torch\.\w+ \[.* is needed"):
        launch(**harmed)


def test_sizes_of_launchers_are_refused():
    with pytest.raises(EngineError, match="4 query heads do not share 3 key heads"):
        AttentionStep(4, 3, 8, 20, "cpu")
    with pytest.raises(EngineError, match="top-5 of 8 experts, but 1 of 2 groups hold only 4"):
        RouterStep(8, 5, 2, 1, True, 1.0, "cpu")
    with pytest.raises(EngineError, match="12 outputs; a multiple of 8"):
        Combine(3, 2, 12)
    _, tensors = LAUNCHERS["sum"]
    shifted = torch.zeros(3 * 2 * 16 + 1)[1:].view(3, 2, 16)
    with pytest.raises(EngineError, match="a multiple of 16 is needed"):
        Combine(3, 2, 16).bind(**tensors | {"partial": shifted})
