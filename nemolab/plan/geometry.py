"""The modules a Nemotron-H config implies: names, parts and shapes, without any file of weights.

Names are the vendor's own (Nemotron-3-Super's spelling). The shapes were checked two ways: against transformers' model of
the same config, module by module, and against tensor counts and byte totals of published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemolab.checkpoint.config import ModelConfig


@dataclass(frozen=True)
class ModuleShape:
    """One module: a linear layer, a norm, a convolution, or one bare parameter such as `A_log`.

    shape   of its weight, logical (unpacked)
    dtype   how it is stored where nothing quantised it
    copies  how many of the same there are; the routed experts of a layer are one entry, named as expert 0
    bias    elements of a bias beside the weight
    linear  a matrix that multiplies tokens, which a quantiser may change
    """

    name: str
    part: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    copies: int = 1
    bias: int = 0
    linear: bool = False

    @property
    def params(self) -> int:
        return self.copies * prod(self.shape)

    @property
    def layer(self) -> int | None:
        found = re.search(r"\blayers\.(\d+)\.", self.name)
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        """What it is wherever it stands: `in_proj`, `shared_experts.up_proj`, `experts`, `lm_head`, `mtp.q_proj`."""
        kind = re.sub(r"^(backbone\.|mtp\.)?(layers\.\d+\.)?(mixer\.)?", "", self.name)
        kind = re.sub(r"^experts\..*", "experts", kind)
        return f"mtp.{kind}" if self.part == "mtp" else kind


def module_shapes(config: ModelConfig) -> list[ModuleShape]:
    """All modules of the language model, MTP last. Vision is not described by the language model's config."""
    modules = [ModuleShape("backbone.embeddings", "embeddings", (config.vocab_size, config.hidden_size))]
    for index, layer_type in enumerate(config.layer_types):
        modules += _layer(config, f"backbone.layers.{index}", layer_type)
    modules.append(_norm("backbone.norm_f", config))
    if not config.tie_word_embeddings:
        modules.append(ModuleShape("lm_head", "head", (config.vocab_size, config.hidden_size), linear=True))
    return modules + list(_mtp(config))


def _norm(name: str, config: ModelConfig) -> ModuleShape:
    return ModuleShape(name, "norm", (config.hidden_size,))


def _linear(name: str, part: str, rows: int, columns: int, biased: bool = False) -> ModuleShape:
    return ModuleShape(name, part, (rows, columns), bias=rows if biased else 0, linear=True)


def _layer(config: ModelConfig, prefix: str, layer_type: str) -> list[ModuleShape]:
    mixers = {"mamba": _mamba, "attention": _attention, "moe": _moe, "mlp": _mlp}
    return [_norm(f"{prefix}.norm", config), *mixers[layer_type](config, f"{prefix}.mixer")]


def _mamba(config: ModelConfig, prefix: str) -> list[ModuleShape]:
    heads, hidden = config.mamba_num_heads, config.hidden_size
    inner = config.mamba_inner
    conv = config.mamba_conv_dim
    return [
        *(ModuleShape(f"{prefix}.{name}", "mamba", (heads,)) for name in ("A_log", "D", "dt_bias")),
        ModuleShape(
            f"{prefix}.conv1d", "mamba", (conv, 1, config.conv_kernel), bias=conv if config.use_conv_bias else 0
        ),
        ModuleShape(f"{prefix}.norm", "mamba", (inner,)),
        _linear(f"{prefix}.in_proj", "mamba", config.mamba_in_rows, hidden, config.use_bias),
        _linear(f"{prefix}.out_proj", "mamba", hidden, inner, config.use_bias),
    ]


def _attention(config: ModelConfig, prefix: str) -> list[ModuleShape]:
    hidden, biased = config.hidden_size, config.attention_bias
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return [
        _linear(f"{prefix}.q_proj", "attention", queries, hidden, biased),
        _linear(f"{prefix}.k_proj", "attention", keys, hidden, biased),
        _linear(f"{prefix}.v_proj", "attention", keys, hidden, biased),
        _linear(f"{prefix}.o_proj", "attention", hidden, queries, biased),
    ]


def _moe(config: ModelConfig, prefix: str) -> list[ModuleShape]:
    hidden, width, inter, biased = config.hidden_size, config.expert_in, config.expert_inter, config.mlp_bias
    modules = [
        ModuleShape(f"{prefix}.gate", "router", (config.n_experts, hidden)),
        ModuleShape(f"{prefix}.gate.e_score_correction_bias", "router", (config.n_experts,), dtype="f32"),
    ]
    if config.moe_latent_size is not None:
        modules += [
            _linear(f"{prefix}.fc1_latent_proj", "latent", width, hidden, biased),
            _linear(f"{prefix}.fc2_latent_proj", "latent", hidden, width, biased),
        ]
    if config.n_shared_experts:
        shared = config.moe_shared_expert_intermediate_size
        modules += [
            _linear(f"{prefix}.shared_experts.up_proj", "shared", shared, hidden, biased),
            _linear(f"{prefix}.shared_experts.down_proj", "shared", hidden, shared, biased),
        ]
    experts = [
        _linear(f"{prefix}.experts.0.up_proj", "routed", inter, width),
        _linear(f"{prefix}.experts.0.down_proj", "routed", width, inter),
    ]
    return modules + [replace(expert, copies=config.n_experts) for expert in experts]


def _mlp(config: ModelConfig, prefix: str) -> list[ModuleShape]:
    hidden, inter = config.hidden_size, config.intermediate_size
    return [
        _linear(f"{prefix}.up_proj", "mlp", inter, hidden, config.mlp_bias),
        _linear(f"{prefix}.down_proj", "mlp", hidden, inter, config.mlp_bias),
    ]


def _mtp(config: ModelConfig) -> Iterator[ModuleShape]:
    """The multi-token-prediction block: one projection in front, its layers, one norm behind; the head is shared."""
    if not config.num_nextn_predict_layers:
        return
    # One block is stored however often it is applied; without a list it is what transformers assumes.
    layer_types = config.mtp_layer_types or ("attention", "moe")
    hidden = config.hidden_size
    modules = [_norm("mtp.layers.0.enorm", config), _norm("mtp.layers.0.hnorm", config)]
    modules.append(_linear("mtp.layers.0.eh_proj", "mtp", hidden, 2 * hidden))
    for index, layer_type in enumerate(layer_types):
        modules += _layer(config, f"mtp.layers.{index}", layer_type)
    modules.append(_norm(f"mtp.layers.{len(layer_types) - 1}.final_layernorm", config))
    yield from (replace(module, part="mtp") for module in modules)


def mamba_state_bytes(config: ModelConfig) -> int:
    """State of one sequence in all Mamba layers: the SSM state in F32, the convolution's window in BF16."""
    ssm = config.mamba_num_heads * config.mamba_head_dim * config.ssm_state_size * 4
    window = config.mamba_conv_dim * config.conv_kernel * 2
    return config.layer_types.count("mamba") * (ssm + window)


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token in all attention layers, in BF16."""
    return config.layer_types.count("attention") * 2 * config.num_key_value_heads * config.head_dim * 2
