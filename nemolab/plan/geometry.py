"""The modules a Nemotron-H config implies, counted without any file of weights: what `structure` expects, and MTP.

The shapes were checked two ways (tests/test_plan.py): against transformers' model of the same config, module by module,
and against the tensor counts and byte totals of published checkpoints.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.structure import expect_modules

# What the multi-token-prediction block is made of where a config asks for one and does not say.
DEFAULT_MTP_LAYERS = ("attention", "moe")


@dataclass(frozen=True)
class ModuleShape:
    """One module: a linear layer, a norm, a convolution, or one bare parameter such as `A_log`.

    shape   of its weight, logical (unpacked)
    dtype   how it is stored where nothing quantised it
    copies  how many of the same there are; the routed experts of a layer are one entry, named as expert 0
    biased  whether a vector of shape[0] biases lies beside the weight
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    copies: int = 1
    biased: bool = False

    @property
    def params(self) -> int:
        """Elements of the weights of all copies."""
        return self.copies * prod(self.shape)

    @property
    def layer(self) -> int | None:
        found = re.search(r"\blayers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        return kind_of(self.name, self.part)


def kind_of(name: str, part: str) -> str:
    """What a module is wherever it stands: `in_proj`, `shared_experts.up_proj`, `experts`, `lm_head`, `mtp.q_proj`."""
    if part == "vision":
        return "vision"
    kind = re.sub(r"^(backbone\.|mtp\.)?(layers\.\d+\.)?(mixer\.)?", "", name)
    kind = re.sub(r"^experts\..*", "experts", kind)
    return f"mtp.{kind}" if part == "mtp" else kind


def module_shapes(config: ModelConfig) -> list[ModuleShape]:
    """All modules of the language model, MTP last. Vision is not described by the language model's config."""
    return [*_backbone(config), *_mtp(config)]


def _backbone(config: ModelConfig) -> Iterator[ModuleShape]:
    # One expert a layer stands for all: a config of a stranger may claim millions of them.
    for name, module in expect_modules(replace(config, n_routed_experts=1)).items():
        shape = (config.n_experts, *module.shape[1:]) if module.part == "router" else module.shape
        dtype = "f32" if name.endswith("e_score_correction_bias") else "bf16"
        copies = config.n_experts if module.part == "routed" else 1
        yield ModuleShape(name, module.part, shape, dtype, copies, module.bias)


def _mtp(config: ModelConfig) -> Iterator[ModuleShape]:
    """The multi-token-prediction block: two norms and a projection in front, its layers, a norm behind.

    It shares the head, and is stored once however often it is applied.
    """
    if not config.num_nextn_predict_layers:
        return
    layer_types = config.mtp_layer_types or DEFAULT_MTP_LAYERS
    hidden, last = config.hidden_size, len(layer_types) - 1
    yield ModuleShape("mtp.layers.0.enorm", "mtp", (hidden,))
    yield ModuleShape("mtp.layers.0.hnorm", "mtp", (hidden,))
    yield ModuleShape("mtp.layers.0.eh_proj", "mtp", (hidden, 2 * hidden))
    for module in _backbone(replace(config, layer_types=layer_types)):
        if module.name.startswith("backbone.layers."):
            yield replace(module, name=module.name.replace("backbone", "mtp", 1), part="mtp")
    yield ModuleShape(f"mtp.layers.{last}.final_layernorm", "mtp", (hidden,))


def mamba_state_bytes(config: ModelConfig) -> int:
    """State of one sequence in all Mamba layers: the SSM state in F32, the convolution's window in BF16."""
    ssm = config.mamba_inner * config.ssm_state_size * 4
    window = config.mamba_conv_dim * config.conv_kernel * 2
    return config.layer_types.count("mamba") * (ssm + window)


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all attention layers, in BF16."""
    return config.layer_types.count("attention") * 2 * config.num_key_value_heads * config.head_dim * 2
