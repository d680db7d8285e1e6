"""A form: everything that decides a synthetic checkpoint's files but its random bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.formats import GROUP
from nemolab.checkpoint.names import kind_of
from nemolab.errors import UsageError
from nemolab.synthetic.vision import Vision

QUANTISED = ("nvfp4", "fp8")
MOST_EXPERTS = 200_000  # listing goes through every tensor: ten times a Super is about a minute
LEAST_WIDTH = 16  # of logits: with fewer a broken model may look like a whole one
LEAST_ACTIVE = 8  # neurons of an expert that a token should find active

_OWNERS = {  # kind of module -> kind of layer it stands in
    "in_proj": "mamba", "out_proj": "mamba", "q_proj": "attention", "k_proj": "attention", "v_proj": "attention",
    "o_proj": "attention", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class FormatTable:
    """Which format each module is stored in.

    kinds    kind of module ("in_proj", "experts", "mtp.experts", "lm_head") -> a format, or one for each layer of its
             type in turn: the third Mamba layer takes the third; models with more layers begin again. Not named: BF16
    modules  canonical module name -> format; wins
    """

    kinds: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    def of(self, module: str, part: str, ordinal: int) -> str:
        """The format of a module in the `ordinal`-th layer of its type."""
        if module in self.modules:
            return self.modules[module]
        kind = kind_of(module, part)
        found = self.kinds.get(kind, "bf16")
        return found if isinstance(found, str) else found[ordinal % len(found)]


@dataclass(frozen=True)
class Form:
    """A checkpoint to be written.

    text         the language model's config.json, without quantisation; its list of layers in the spelling wanted
    formats      which format each module is stored in
    seed, name   what the random bits depend on; what the model is called
    outer        fields around `llm_config` of a multimodal config.json; None for a language model alone
    prefix       how the backbone is spelled
    metadata     "both", "config", "hf_quant" or "none": where the formats are said
    uniform      the older metadata: one algorithm and what is excluded
    kv_cache     what the metadata says about the key-value cache
    weight_only  formats whose modules have no input_scale
    kv_scales    attention layers keep a scale each for keys and values
    input_scale  whether the other quantised modules have one
    scalar_shape shape of weight_scale_2, input_scale and FP8's weight_scale: () or (1,)
    vision       the tower beside the language model, or None
    sparsity     share of the routed experts' neurons that ReLU^2 leaves at zero; 0.5: nothing is planted
    skew         popularity of experts falls as rank^-skew; 0: all alike
    """

    text: dict[str, Any]
    formats: FormatTable
    seed: int = 0
    name: str = "synthetic"
    outer: dict[str, Any] | None = None
    prefix: str = "backbone."
    metadata: str = "both"
    uniform: bool = False
    kv_cache: str | None = "FP8"
    weight_only: frozenset[str] = frozenset()
    kv_scales: bool = False
    input_scale: bool = True
    scalar_shape: tuple[int, ...] = ()
    vision: Vision | None = None
    sparsity: float = 0.9
    skew: float = 0.8

    @cached_property
    def config(self) -> ModelConfig:
        """The same, read and checked. Raises CheckpointError naming the field."""
        return ModelConfig.from_dict(self.text, "the synthetic config")

    @property
    def zero_share(self) -> float:
        """Share of neurons planted at zero: `sparsity`, or less where too few neurons would be left to matter."""
        return max(0.5, min(self.sparsity, 1 - LEAST_ACTIVE / self.config.expert_inter))

    def has_input_scale(self, format: str) -> bool:
        return self.input_scale and format in QUANTISED and format not in self.weight_only


def layer_type_of(kind: str) -> str | None:
    """The type of layer a kind of module stands in; None for what stands in no layer."""
    if kind.startswith("mtp."):
        return None
    if kind in _OWNERS:
        return _OWNERS[kind]
    return "moe" if kind.startswith(("experts", "shared_experts", "fc1_latent", "fc2_latent", "gate")) else None


def check_form(form: Form) -> None:
    """Refuse what cannot be stored or run as asked, before anything is listed. Raises UsageError naming the field."""
    from nemolab.synthetic.tensors import list_linears

    config = form.config
    experts = config.n_experts * (*config.layer_types, *config.mtp_layer_types).count("moe")
    routable = f"at least {2 * config.n_group} (routing ranks groups by their two best)"
    checks = [
        (config.vocab_size >= LEAST_WIDTH, "vocab_size", f"at least {LEAST_WIDTH}"),
        (config.hidden_size >= LEAST_WIDTH // 2, "hidden_size", f"at least {LEAST_WIDTH // 2}"),
        (config.layer_norm_epsilon <= 1, "layer_norm_epsilon", "at most 1, below which norms still see their input,"),
        (experts <= MOST_EXPERTS, "n_routed_experts", f"at most {MOST_EXPERTS:,} in all MoE layers together"),
        (config.n_experts // config.n_group > 1, "n_routed_experts", routable),
        (config.moe_intermediate_size % GROUP == 0, "moe_intermediate_size", f"a multiple of {GROUP}"),
        (config.routed_scaling_factor > 0, "routed_scaling_factor", "a number > 0, so that experts matter,"),
        (config.num_nextn_predict_layers <= 1, "num_nextn_predict_layers", "0 or 1, the blocks that releases store,"),
        (config.mlp_hidden_act == "relu2", "mlp_hidden_act", "relu2, which the family computes,"),
        (config.mamba_hidden_act == "silu", "mamba_hidden_act", "silu, which the family computes,"),
    ]
    if "moe" not in config.layer_types:
        raise UsageError("the list of layers has no MoE layer (E); without experts there is nothing to keep on disk")
    high = [id for id in config.eos_token_ids if id >= config.vocab_size]
    if high and config.eos_token_ids != (2,):
        raise UsageError(f"eos_token_id is {high[0]}; ids below vocab_size {config.vocab_size:,} were expected")
    for holds, name, needed in checks:
        if not holds:
            raise UsageError(f"{name} is {getattr(config, name)!r}; {needed} was expected")
    for name, (rows, columns), format in list_linears(form):
        if format == "nvfp4" and columns % GROUP:
            raise UsageError(
                f"{name} [{rows}, {columns}] cannot be NVFP4: its {columns} columns are no whole groups of {GROUP};"
                f" choose a size that {GROUP} divides"
            )
