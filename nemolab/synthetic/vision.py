"""The vision tower and projector of Nemotron-3.5-Super-VL, in both layouts of names. Listed and stored, never run.

| size   | in config.json                          |
|--------|-----------------------------------------|
| width  | vit_hidden_size                         |
| blocks | vision_config.num_hidden_layers         |
| inner  | projector_hidden_size                   |
| patch  | patch_size: 3 colours of patch x patch  |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nemolab.synthetic import draws

LAYOUTS = ("timm", "hf")
REGISTERS = 10


@dataclass(frozen=True)
class Vision:
    """A tower: the layout of its names and its sizes."""

    layout: str = "timm"
    width: int = 1280
    blocks: int = 32
    inner: int = 20480
    patch: int = 16
    positions: int = 128 * 128


def list_vision(vision: Vision, hidden: int) -> Iterator[tuple[str, str, tuple[int, ...], object]]:
    """(name, dtype, shape, draw) of every tensor; `hidden`: width of the language model."""
    for name, shape in (_timm if vision.layout == "timm" else _hf)(vision, hidden, 3 * vision.patch**2):
        if name.endswith("summary_idxs"):
            yield name, "I64", shape, draws.Integers()
        elif name.endswith(("norm_mean", "norm_std")):
            yield name, "F32", shape, draws.Numbers("f32", (0.5,) * 3)
        elif len(shape) == 1:
            yield name, "BF16", shape, draws.Vector("bf16", 0.0 if name.endswith("bias") else 1.0, 0.1)
        else:
            yield name, "BF16", shape, draws.float_matrix("bf16", shape[-1] ** -0.5)


def _timm(vision: Vision, hidden: int, patch: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = vision.width, vision.inner
    tower = "vision_model.radio_model"
    yield f"{tower}.input_conditioner.norm_mean", (3, 1, 1)
    yield f"{tower}.input_conditioner.norm_std", (3, 1, 1)
    yield f"{tower}.summary_idxs", (2,)
    generator = f"{tower}.model.patch_generator"
    yield f"{generator}.embedder.weight", (width, patch)
    yield f"{generator}.video_embedder.weight", (width, 2 * patch)
    yield f"{generator}.pos_embed", (1, vision.positions, width)
    yield f"{generator}.cls_token.token", (REGISTERS, width)
    for block in range(vision.blocks):
        name = f"{tower}.model.blocks.{block}"
        yield from _with_bias(f"{name}.norm1", (width,))
        yield from _with_bias(f"{name}.attn.qkv", (3 * width, width))
        yield from _with_bias(f"{name}.attn.proj", (width, width))
        yield from _with_bias(f"{name}.norm2", (width,))
        yield from _with_bias(f"{name}.mlp.fc1", (4 * width, width))
        yield from _with_bias(f"{name}.mlp.fc2", (width, 4 * width))
    yield from _with_bias("vision_projector.vision_final_layernorm", (width,))
    yield "mlp1.0.weight", (4 * width,)
    yield "mlp1.1.weight", (inner, 4 * width)
    yield "mlp1.3.weight", (hidden, inner)


def _hf(vision: Vision, hidden: int, patch: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = vision.width, vision.inner
    embeddings = "vision_model.embeddings"
    yield f"{embeddings}.patch_projection.weight", (width, patch)
    yield f"{embeddings}.video_patch_projection.weight", (width, 2 * patch)
    yield f"{embeddings}.position_embedding", (1, vision.positions, width)
    yield f"{embeddings}.cls_register_token", (1, REGISTERS, width)
    yield "vision_model.summary_idxs", (2,)
    for block in range(vision.blocks):
        name = f"vision_model.encoder.layer.{block}"
        yield from _with_bias(f"{name}.norm1", (width,))
        for matrix in ("query", "key", "value"):
            yield from _with_bias(f"{name}.attention.attention.{matrix}", (width, width))
        yield from _with_bias(f"{name}.attention.output.dense", (width, width))
        yield f"{name}.layer_scale1.lambda1", (width,)
        yield from _with_bias(f"{name}.norm2", (width,))
        yield from _with_bias(f"{name}.mlp.fc1", (4 * width, width))
        yield from _with_bias(f"{name}.mlp.fc2", (width, 4 * width))
        yield f"{name}.layer_scale2.lambda1", (width,)
    yield from _with_bias("vision_projector.vision_final_layernorm", (width,))
    yield "vision_projector.mlp1.norm.weight", (4 * width,)
    yield "vision_projector.mlp1.linear1.weight", (inner, 4 * width)
    yield "vision_projector.mlp1.linear2.weight", (hidden, inner)


def _with_bias(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
