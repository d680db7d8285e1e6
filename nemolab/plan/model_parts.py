"""What a built model consists of besides its routed experts: every tensor, with the part it belongs to.

Parts are told from where a tensor stands and what it is: inside the block that routes, in a layer with experts, in an
embedding, in a sub-model that is not the text's. Names of attributes only choose between mixers, for display.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from nemolab.plan.expert_finder import RoutedExperts

if TYPE_CHECKING:
    import torch
    from torch import nn

_DTYPES = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32",
    "uint8": "u8", "bool": "bool",
}  # fmt: skip
_MIXERS = {"attention": r"attn|attention", "mamba": r"mamba|ssm"}
_MLP = re.compile(r"mlp|ffn|feed_?forward|shared")


@dataclass(frozen=True)
class Weight:
    """One tensor that is stored.

    module  the name of the module that owns it
    kind    what it is wherever it stands, as tables show it: its name without layer and `.weight`
    dtype   how it is stored where nothing quantised it
    linear  the matrix of a linear layer: what a number format may be asked for
    """

    name: str
    module: str
    part: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    linear: bool

    @property
    def params(self) -> int:
        return prod(self.shape)


def list_weights(model: nn.Module, routed: list[RoutedExperts]) -> list[Weight]:
    """Every stored tensor but the routed experts', each once: a table that is the head too is listed as embeddings."""
    modules = dict(model.named_modules())
    experts = {name for found in routed for name in _expert_tensors(found)}
    parts = _Parts(model, modules, routed)
    listed, seen = [], set()
    for owner, name, tensor in _tensors(modules):
        if id(tensor) in seen or name in experts:
            continue
        seen.add(id(tensor))
        module = modules[owner]
        listed.append(
            Weight(
                name=name,
                module=owner,
                part=parts.of(owner, name, tensor),
                kind=re.sub(r"^.*?\.\d+\.", "", name.removeprefix("model.")).removesuffix(".weight"),
                shape=tuple(tensor.shape),
                dtype=_dtype(tensor),
                linear=tensor.dim() == 2 and _is_linear(module) and name.endswith(".weight"),
            )
        )
    return listed


def _expert_tensors(found: RoutedExperts) -> Iterator[str]:
    candidate = found.candidate
    for holder in candidate.holders if candidate.listed else ("",):
        yield from (f"{holder}.{name}" if holder else name for name in candidate.stacks)


def _tensors(modules: dict[str, nn.Module]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(owner, name, tensor) of what a checkpoint stores: parameters, and buffers that are not made anew."""
    for owner, module in modules.items():
        prefix = f"{owner}." if owner else ""
        for key, value in module.named_parameters(recurse=False):
            yield owner, prefix + key, value
        for key, value in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield owner, prefix + key, value


def _dtype(tensor: torch.Tensor) -> str:
    """Models ask for F32 where they compute in it; files have it for vectors, matrices are stored like the rest."""
    if tensor.dim() >= 2 and tensor.is_floating_point():
        return "bf16"
    return _DTYPES.get(str(tensor.dtype).removeprefix("torch."), "f32")


def _is_linear(module: nn.Module) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


class _Parts:
    """The part a tensor belongs to."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], routed: list[RoutedExperts]):
        import torch

        self.modules = modules
        head = ask(model, "get_output_embeddings")
        self.head = {name for name, module in modules.items() if module is head}
        self.embeddings = {name for name, module in modules.items() if isinstance(module, torch.nn.Embedding)}
        self.texts = _text_roots(model, modules)
        self.blocks = {found.candidate.block: found for found in routed}
        self.moe_layers = {_layer_of(found.candidate.block) for found in routed}

    def of(self, owner: str, name: str, tensor: torch.Tensor) -> str:
        if owner in self.head:
            return "head"
        if self.texts and not any(name.startswith(f"{root}.") for root in self.texts):
            return "vision"
        if names_mtp(name):
            return "mtp"
        if owner in self.embeddings:
            return "embeddings"
        layer = _layer_of(name)
        block = next((block for block in self.blocks if block != layer and name.startswith(f"{block}.")), None)
        if block is not None:
            return self._of_block(block, name, tensor)
        if layer is None:
            return "norm" if tensor.dim() == 1 else "other"
        child = name.removeprefix(f"{layer}.").partition(".")[0]
        if layer in self.blocks and self._knows_experts(layer, child):
            return "router"
        return self._of_layer(layer, name.removeprefix(f"{layer}."), tensor)

    def _of_block(self, block: str, name: str, tensor: torch.Tensor) -> str:
        """Within the module that routes: what knows the number of experts is the router, what else has weights is
        shared, and what only changes the width of the hidden state leads to a latent space and back."""
        found = self.blocks[block]
        child = name.removeprefix(f"{block}.").partition(".")[0]
        module = self.modules.get(f"{block}.{child}")
        if self._knows_experts(block, child) or (module is None and found.experts in tensor.shape[:1]):
            return "router"
        width = found.matrices[0][1]
        if module is not None and _is_linear(module) and width in module.weight.shape and 1 not in module.weight.shape:
            return "latent"
        return "shared"

    def _knows_experts(self, block: str, child: str) -> bool:
        """Whether a child has a row for every expert and no matrix that leads back to the hidden state, as an MLP has:
        its neurons may be as many as the experts."""
        found = self.blocks[block]
        module = self.modules.get(f"{block}.{child}")
        scored, width = {found.experts, found.experts + found.identities}, found.matrices[0][1]
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        if any(value.dim() == 2 and value.shape[0] == width and width not in scored for value in tensors):
            return False
        return any(value.dim() <= 2 and value.shape and value.shape[0] in scored for value in tensors)

    def _of_layer(self, layer: str, within: str, tensor: torch.Tensor) -> str:
        """By the names of the layer's attributes, outermost first; where one is a word for all, such as mixer, by that
        of its class."""
        segments = within.split(".")[:-1]
        for depth, segment in enumerate(segments, start=1):
            module = self.modules.get(".".join((layer, *segments[:depth])))
            for name in (segment.lower(), type(module).__name__.lower()):
                if "norm" in name:
                    return "norm"
                for part, words in _MIXERS.items():
                    if re.search(words, name):
                        return part
                if _MLP.search(name):
                    return "shared" if layer in self.moe_layers else "mlp"
        return "norm" if tensor.dim() <= 1 else "other"


def _text_roots(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    """Names of the sub-models whose config is the text part of a multimodal one; none: all of it is text."""
    config, text = model.config, text_config(model)
    if text is config:
        return []
    return [name for name, module in modules.items() if name and getattr(module, "config", None) is text]


def _layer_of(name: str) -> str | None:
    """`model.layers.3` of `model.layers.3.mlp.gate.weight`."""
    found = re.match(r"(.*?\.\d+)(\.|$)", name)
    return found[1] if found else None


def text_config(model: nn.Module) -> Any:
    """The config of the language model; that of the whole where it is not one alone."""
    try:
        return model.config.get_text_config(decoder=True)
    except Exception:  # more than one text config, or a config that has no such notion
        return model.config


def ask(model: nn.Module, method: str) -> nn.Module | None:
    """What a model says of itself; None where it has no answer, which some say by an error."""
    try:
        return getattr(model, method)()
    except Exception:
        return None


def names_mtp(name: str) -> bool:
    """Whether a module or tensor is of a multi-token-prediction block."""
    return re.search(r"(^|[._])(mtp|nextn)", name) is not None
