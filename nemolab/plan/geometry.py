"""The modules a Nemotron-H config implies, counted without any file of weights: what `structure` expects, and MTP.

The shapes were checked two ways (tests/test_plan.py): against transformers' model of the same config, module by module,
and against the tensor counts and byte totals of published checkpoints.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.names import kind_of
from nemolab.checkpoint.structure import Expected, expect_modules, expect_mtp

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


def module_shapes(config: ModelConfig) -> list[ModuleShape]:
    """All modules of the language model, MTP last. Vision is not described by the language model's config."""
    return [*_backbone(config), *_mtp(config)]


def _backbone(config: ModelConfig) -> Iterator[ModuleShape]:
    yield from _count(expect_modules(_with_one_expert(config)), config)


def _mtp(config: ModelConfig) -> Iterator[ModuleShape]:
    """One multi-token-prediction block, stored once however often it is applied. It shares the head."""
    if config.num_nextn_predict_layers:
        layer_types = config.mtp_layer_types or DEFAULT_MTP_LAYERS
        one = replace(_with_one_expert(config), num_nextn_predict_layers=1, mtp_layer_types=layer_types)
        yield from (replace(module, part="mtp") for module in _count(expect_mtp(one), config))


def _with_one_expert(config: ModelConfig) -> ModelConfig:
    """One expert a layer stands for all: a config of a stranger may claim millions of them."""
    return replace(config, n_routed_experts=1)


def _count(expected: dict[str, Expected], config: ModelConfig) -> Iterator[ModuleShape]:
    """The modules of a config with one expert, as they are with all."""
    for name, module in expected.items():
        shape = (config.n_experts, *module.shape[1:]) if module.part == "router" else module.shape
        dtype = "f32" if name.endswith("e_score_correction_bias") else "bf16"
        copies = config.n_experts if module.part == "routed" else 1
        yield ModuleShape(name, module.part, shape, dtype, copies, module.bias)


def mamba_state_bytes(config: ModelConfig) -> int:
    """State of one sequence in all Mamba layers: the SSM state in F32, the convolution's window in BF16."""
    ssm = config.mamba_inner * config.ssm_state_size * 4
    window = config.mamba_conv_dim * config.conv_kernel * 2
    return config.layer_types.count("mamba") * (ssm + window)


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all attention layers, in BF16."""
    return config.layer_types.count("attention") * 2 * config.num_key_value_heads * config.head_dim * 2
