"""ModelConfig: the sizes and switches of a NemotronH model, from any config.json of the family."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemolab.checkpoint.json_files import read_json
from nemolab.checkpoint.layer_lists import MTP_SPELLINGS, read_layer_list
from nemolab.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# Where a multimodal config keeps its language model.
NESTED_KEYS = ("llm_config", "text_config", "language_config")

# Older names that transformers still accepts -> today's.
_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}

# Defaults are those of transformers' NemotronHConfig. Sizes that decide a model's bytes have none here: a config that
# leaves them out is refused, because a guessed width would be reported as if it had been read.
_SIZES_NEEDED = {
    "always": ("hidden_size", "vocab_size"),
    "mamba": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    "attention": ("num_attention_heads",),
    "moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "mlp": ("intermediate_size",),
}
_SIZES = {
    "hidden_size": None, "vocab_size": None, "intermediate_size": 21504, "max_position_embeddings": 4096,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "chunk_size": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
_SWITCHES = {
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
    "norm_topk_prob": True,
}  # fmt: skip
_NUMBERS = {"layer_norm_epsilon": 1e-5, "routed_scaling_factor": 1.0, "time_step_min": 0.001}
_WORDS = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}

_LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements, named as in the vendor's config. `notes`: contradictions, resolved; `raw`: all of it."""

    model_type: str
    layer_types: tuple[str, ...]  # "mamba", "moe", "attention" or "mlp", one a layer
    mtp_layer_types: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int | None
    n_group: int
    topk_group: int
    num_nextn_predict_layers: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    use_bias: bool
    use_conv_bias: bool
    norm_topk_prob: bool
    layer_norm_epsilon: float
    routed_scaling_factor: float
    time_step_min: float
    time_step_limit: tuple[float, float]
    mlp_hidden_act: str
    mamba_hidden_act: str
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path) -> "ModelConfig":
        """From a config.json or a folder with one; a generation_config.json beside it decides the stop ids."""
        path = Path(path)
        file = path / CONFIG_FILE if path.is_dir() else path
        config = read_json(file)
        generation = file.with_name(GENERATION_FILE)
        if path.is_dir() and os.path.lexists(generation):
            stop_ids = read_json(generation).get("eos_token_id")
            return cls.from_dict(config, where=str(file), eos_token_id=stop_ids, eos_where=str(generation))
        return cls.from_dict(config, where=str(file))

    @classmethod
    def from_dict(
        cls, config: dict, where: str = CONFIG_FILE, *, eos_token_id: object = None, eos_where: str = ""
    ) -> "ModelConfig":
        """From a parsed config. Raises CheckpointError naming `where`, the field, what was found and what is needed."""
        model_type = config.get("model_type")
        text = _find_text_config(config, where)
        layers = read_layer_list(text, where)
        if layers is None:
            raise CheckpointError(
                f"{where} has no list of layers: hybrid_override_pattern, layers_block_type or layer_types is needed"
            )
        read = _Reader(_renamed(text), where)
        for kind, names in _SIZES_NEEDED.items():
            if kind == "always" or kind in layers:
                read.require(names, kind)
        if text.get("num_key_value_heads", 0) is None:
            read.values["num_key_value_heads"] = text.get("num_attention_heads")
        values: dict[str, Any] = {name: read.size(name, default) for name, default in _SIZES.items()}
        values |= {name: read.switch(name, default) for name, default in _SWITCHES.items()}
        values |= {name: read.number(name, default) for name, default in _NUMBERS.items()}
        values |= {name: read.word(name, default) for name, default in _WORDS.items()}
        own_eos = _read_eos(read.values.get("eos_token_id", 2), where)
        latent = read.values.get("moe_latent_size")
        made = cls(
            model_type=str(model_type),
            layer_types=layers,
            mtp_layer_types=read_layer_list(text, where, MTP_SPELLINGS) or (),
            moe_latent_size=read.size("moe_latent_size", None) if latent is not None else None,
            n_shared_experts=read.count("n_shared_experts", 1),
            num_nextn_predict_layers=read.count("num_nextn_predict_layers", 0),
            time_step_limit=_read_limit(read.values.get("time_step_limit"), where),
            eos_token_ids=_read_eos(eos_token_id, eos_where) or own_eos,
            notes=tuple(_count_notes(text, layers, where)),
            raw=config,
            **values,
        )
        _check_together(made, where)
        return made

    # What the rest of the package asks for, derived in one place.

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Indices of the layers of one kind."""
        return tuple(index for index, layer in enumerate(self.layer_types) if layer == kind)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self.layers_of("moe")

    @property
    def n_experts(self) -> int:
        """Routed experts in each MoE layer."""
        return self.n_routed_experts

    @property
    def top_k(self) -> int:
        return self.num_experts_per_tok

    @property
    def reachable_experts(self) -> int:
        """Experts of a MoE layer that one token can choose among: those of its best `topk_group` groups."""
        return self.n_experts // self.n_group * self.topk_group

    @property
    def expert_in(self) -> int:
        """Width X an expert reads and writes: the latent size, or the hidden size where there is no latent."""
        return self.moe_latent_size or self.hidden_size

    @property
    def expert_inter(self) -> int:
        """Neurons I of a routed expert."""
        return self.moe_intermediate_size

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_conv_dim(self) -> int:
        """Channels of the short convolution: x, B and C."""
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def mamba_in_rows(self) -> int:
        """Rows of in_proj: gate z, then x B C, then one time step a head."""
        return self.mamba_inner + self.mamba_conv_dim + self.mamba_num_heads


class _Reader:
    """Typed look-ups in one config with errors that name the field."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def _fail(self, name: str, needed: str) -> CheckpointError:
        value = self.values.get(name)
        shown = "null" if value is None else repr(str(value)[:60])
        return CheckpointError(f"{self.where}: {name} is {shown}; {needed} was expected")

    def require(self, names: tuple[str, ...], kind: str) -> None:
        for name in names:
            if self.values.get(name) is None:
                reason = "every model" if kind == "always" else f"a model with {kind} layers"
                raise CheckpointError(f"{self.where} has no {name}, which {reason} needs")

    def size(self, name: str, default: int | None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
            raise self._fail(name, "a whole number >= 1")
        return value

    def count(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value <= _LARGEST_SIZE:
            raise self._fail(name, "a whole number >= 0")
        return value

    def switch(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self._fail(name, "true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self._fail(name, "a finite number >= 0")
        return float(value)

    def word(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self._fail(name, "a word")
        return value


def _find_text_config(config: dict, where: str) -> dict:
    """The language model's part of a config; refuses other families by name."""
    for key in NESTED_KEYS:
        if config.get(key) is not None and not isinstance(config[key], dict):
            raise CheckpointError(f"{where}: {key} is a {type(config[key]).__name__}; an object was expected")
    nested = next((key for key in NESTED_KEYS if isinstance(config.get(key), dict)), None)
    text = config[nested] if nested else config
    _check_architectures(config, text, where)
    types = [str(part.get("model_type")) for part in (config, text) if part.get("model_type") is not None]
    # Spelled nemotron_h, nemotron_h_omni, NemotronH_Nano_VL_V2, ... by the vendor.
    if not types:
        raise CheckpointError(f"{where} has no model_type; nemotron_h was expected, as the Nemotron-H family says it")
    if not any(map(_is_of_the_family, types)):
        found = ", ".join(dict.fromkeys(types))
        raise CheckpointError(
            f"{where}: model_type {found[:80]!r} is not of the Nemotron-H family (nemotron_h), the one that is read:"
            " it needs a list of layers (hybrid_override_pattern or layers_block_type) and the sizes of each kind"
        )
    return text


def _is_of_the_family(name: str) -> bool:
    return name.lower().replace("_", "").replace("-", "").startswith("nemotronh")


def _check_architectures(config: dict, text: dict, where: str) -> None:
    """A config need not say its architectures; one that says others only is of another model, whatever model_type."""
    said: list[str] = []
    for part in (config, text):
        names = part.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise CheckpointError(f"{where}: architectures is {str(names)[:60]!r}; a list of names was expected")
        said += names or []
    if said and not any(map(_is_of_the_family, said)):
        raise CheckpointError(
            f"{where}: architectures is {', '.join(dict.fromkeys(said))[:80]!r}; a NemotronH architecture was expected"
        )


def _renamed(text: dict) -> dict:
    return {_ALIASES[key]: value for key, value in text.items() if key in _ALIASES} | text


def _read_limit(value: object, where: str) -> tuple[float, float]:
    """(lowest, highest) time step; JSON cannot say infinity, so it comes as Infinity, "Infinity", null or an object."""
    if value is None:
        return (0.0, math.inf)
    if isinstance(value, list) and len(value) == 2:
        low, high = _read_float(value[0], 0.0), _read_float(value[1], math.inf)
        if low is not None and high is not None and 0 <= low <= high and low < math.inf:
            return (low, high)
    raise CheckpointError(f"{where}: time_step_limit is {str(value)[:80]}; two numbers 0 <= low <= high were expected")


def _read_float(value: object, if_null: float) -> float | None:
    if value is None:
        return if_null
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str) and value.lower().lstrip("+-") in ("infinity", "inf"):
        return -math.inf if value.startswith("-") else math.inf
    if type(value) not in (int, float) or (isinstance(value, int) and abs(value) > _LARGEST_SIZE) or math.isnan(value):
        return None
    return float(value)


def _read_eos(value: object, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in ids):
        raise CheckpointError(
            f"{where}: eos_token_id is {str(value)[:60]!r}; a token id or a list of them was expected"
        )
    return tuple(dict.fromkeys(ids))


def _count_notes(text: dict, layers: tuple[str, ...], where: str) -> list[str]:
    said = text.get("num_hidden_layers")
    if said is not None and said != len(layers):
        return [
            f"{where}: num_hidden_layers says {str(said)[:40]}, the list of layers has {len(layers)}; the list is used"
        ]
    return []


def _check_together(config: ModelConfig, where: str) -> None:
    """Sizes that only make sense together."""
    checks = []
    if "moe" in config.layer_types:
        top_k, experts, n_group, topk_group = config.top_k, config.n_experts, config.n_group, config.topk_group
        reachable = config.reachable_experts
        checks += [
            (top_k <= experts, "num_experts_per_tok", top_k, f"<= n_routed_experts {experts}"),
            (experts % n_group == 0, "n_group", n_group, f"a divisor of {experts} experts"),
            (topk_group <= n_group, "topk_group", topk_group, f"<= n_group {n_group}"),
            (top_k <= reachable, "num_experts_per_tok", top_k, f"<= the {reachable} experts of topk_group"),
        ]
    if "attention" in config.layer_types:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        checks.append((heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} heads"))
    if "mamba" in config.layer_types:
        heads = config.mamba_num_heads
        checks.append((heads % config.n_groups == 0, "n_groups", config.n_groups, f"a divisor of {heads} Mamba heads"))
    for holds, name, value, needed in checks:
        if not holds:
            raise CheckpointError(f"{where}: {name} is {value}; {needed} was expected")
