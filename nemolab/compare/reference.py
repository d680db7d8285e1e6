"""The reference: transformers' NemotronH in float32 on the CPU, one block in memory at a time.

All texts go through a block together, so the weights are read once; a Nemotron-3-Super (120B) needs about 4 GiB so
(`peak_bytes` gives the arithmetic), where the whole model in float32 would need 450. Things of transformers that are
set right here:

- The Mamba time step. The chunked path floors it at `time_step_min`, the one-token path does not, and neither follows
  the checkpoint's `time_step_limit`. The limit (absent: 0 to infinity) is set on every mixer, checked and recorded in
  `Reference.settings`. `stock=True` leaves transformers as it is, to show that the self-check sees the difference.
- Attention's projections have no biases in transformers, whatever `attention_bias` says; the vendor's own model code
  gives all four one. They get theirs.
- Attention outside a whole model is causal only under an implementation that masks by itself ("sdpa").
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from nemolab.compare.weights import LazyExperts, SourceWeights, check_shape
from nemolab.errors import CheckpointError, NemolabError
from nemolab.progress import Progress

if TYPE_CHECKING:
    from nemolab.checkpoint import Checkpoint, ModelConfig

LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention", "moe": "moe", "mlp": "mlp"}
# Blocks that carry something from token to token; the others map each position on its own.
STATEFUL = ("mamba", "attention")
NO_LIMIT = (0.0, math.inf)


@dataclasses.dataclass
class Reading:
    """What the reference made of one text: the last hidden states, from which logits are formed row by row.

    hidden  [tokens, hidden] float32, after the final norm
    gap     [tokens] smallest distance, over the MoE layers, between the last expert chosen and the first one not chosen
    """

    ids: list[int]
    hidden: torch.Tensor
    gap: torch.Tensor
    head: torch.Tensor

    def logits(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Logits of the positions start..stop as float32 [rows, vocabulary]."""
        with torch.inference_mode():
            return torch.nn.functional.linear(self.hidden[start:stop], self.head)


class Reference:
    """transformers' NemotronH over a checkpoint's own files.

    Raises CheckpointError when a tensor is missing, superfluous or misshapen, with its name.
    """

    def __init__(self, checkpoint: Checkpoint, *, stock: bool = False):
        from transformers.models.nemotron_h import modeling_nemotron_h  # seconds: here rather than in the first block

        self._modeling = modeling_nemotron_h
        self.config = transformers_config(checkpoint.config)
        self.layer_types = checkpoint.config.layer_types
        # transformers builds a shared expert whatever n_shared_experts says.
        self._shared_experts = checkpoint.config.n_shared_experts > 0
        self._attention_bias = checkpoint.config.attention_bias
        self.time_step_limit = (self.config.time_step_min, math.inf) if stock else checkpoint.config.time_step_limit
        self.stock = stock
        self.weights = SourceWeights(checkpoint)
        self._path = checkpoint.path
        self._head: torch.Tensor | None = None
        self._limits_seen: set[tuple[float, float]] = set()

    @property
    def settings(self) -> dict:
        """What a report needs to say about the reference. Time-step limits are those the mixers really held."""
        import transformers

        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": "float32",
            "attention": self.config._attn_implementation,
            "experts": self.config._experts_implementation,
            "decoder": "transformers.integrations.finegrained_fp8.Fp8Dequantize",
            "time_step_limit": sorted(self._limits_seen),
            "time_step_floor_of_transformers": self.stock,
            "token_by_token": "Mamba and attention blocks; MoE and MLP blocks map each position on its own",
        }

    def read(
        self, texts: Mapping[str, list[int]], *, stepwise: tuple[str, ...] = (), progress: Progress | None = None
    ) -> dict[str, Reading]:
        """Put all texts through the model, block by block.

        texts     ids by name; each is a sequence of its own (batch 1, no padding, nothing put in front)
        stepwise  names of texts that go through the blocks with state token by token, with transformers' cache
        """
        unknown = set(stepwise) - set(texts)
        if unknown or not texts or not all(texts.values()):
            raise NemolabError(f"nothing to read: texts {[*texts]} (each needs a token), stepwise {[*stepwise]}")
        names = list(texts)
        with torch.inference_mode(), quiet_transformers():
            hidden = self._embed(texts)
            gaps = {name: torch.full((len(texts[name]),), math.inf) for name in names}
            for index, kind in enumerate(self.layer_types):
                if progress:
                    progress(index, len(self.layer_types) + 1)
                block = self._build_block(index)
                if kind in STATEFUL:
                    for name in names:
                        run = self._step_through if name in stepwise else self._run_whole
                        hidden[name] = run(block, hidden[name])
                else:
                    with _RoutingGap(block.mixer) as routing:
                        everything = block(torch.cat([hidden[name] for name in names], dim=1))
                    lengths = [len(texts[name]) for name in names]
                    hidden = dict(zip(names, everything.split(lengths, dim=1), strict=True))
                    if routing.gap is not None:
                        for name, gap in zip(names, routing.gap.split(lengths), strict=True):
                            gaps[name] = torch.minimum(gaps[name], gap)
                del block
            norm = self._final_norm()
            hidden = {name: norm(hidden[name])[0] for name in names}
            head = self._read_head()
            self._check_everything_used()
        if progress:
            progress(len(self.layer_types) + 1, len(self.layer_types) + 1)
        return {name: Reading(texts[name], hidden[name], gaps[name], head) for name in names}

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits of one text in one pass, float32 [tokens, vocabulary]."""
        return self.read({"text": ids})["text"].logits()

    def logits_stepwise(self, ids: list[int]) -> torch.Tensor:
        """Logits of one text token by token, float32 [tokens, vocabulary]."""
        return self.read({"text": ids}, stepwise=("text",))["text"].logits()

    def _embed(self, texts: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
        """Hidden states [1, tokens, hidden] by name; only the rows of the table that occur are made float32."""
        table = "backbone.embeddings.weight"
        distinct = sorted({token for ids in texts.values() for token in ids})
        place = {token: at for at, token in enumerate(distinct)}
        rows = self.weights.rows(table, distinct)
        check_shape(table, rows, (len(distinct), self.config.hidden_size))
        return {name: rows[[place[token] for token in ids]][None] for name, ids in texts.items()}

    def _build_block(self, index: int) -> torch.nn.Module:
        """One block with its weights in float32; routed experts stay in the files until they are asked for."""
        with torch.device("meta"):
            block = self._modeling.NemotronHBlock(self.config, layer_idx=index).eval()
            if self.layer_types[index] == "attention" and self._attention_bias:
                add_attention_biases(block.mixer)
        prefix = f"backbone.layers.{index}"
        if self.layer_types[index] == "moe":
            self._stand_in_for_experts(block.mixer.experts, f"{prefix}.mixer.experts")
            if not self._shared_experts:
                block.mixer.shared_experts = _AddsNothing()
        state = {}
        for key, empty in block.state_dict().items():
            state[key] = self.weights.tensor(f"{prefix}.{key}")
            check_shape(f"{prefix}.{key}", state[key], empty.shape)
        self.weights.check_all_claimed(self.weights.under(prefix), prefix)
        block.load_state_dict(state, strict=True, assign=True)
        if self.layer_types[index] == "mamba":
            self._set_time_step_limit(block.mixer)
        return block

    def _stand_in_for_experts(self, experts: torch.nn.Module, prefix: str) -> None:
        for kind in ("up_proj", "down_proj"):
            count, *shape = getattr(experts, kind).shape
            del experts._parameters[kind]
            names = [f"{prefix}.{expert}.{kind}.weight" for expert in range(count)]
            setattr(experts, kind, LazyExperts(self.weights, names, tuple(shape)))

    def _set_time_step_limit(self, mixer: torch.nn.Module) -> None:
        """Make both paths of a mixer hold the time step within the limit, and note the limit it has."""
        mixer.time_step_limit = self.time_step_limit
        if not self.stock and self.time_step_limit != NO_LIMIT:
            # The one-token path clamps nothing, so what enters softplus is clamped for both paths.
            low, high = (inverse_softplus(limit) for limit in self.time_step_limit)

            def clamp_time_step(module, inputs, projected):
                step = projected[..., -mixer.num_heads :]
                step.clamp_(min=low - mixer.dt_bias, max=high - mixer.dt_bias)

            mixer.in_proj.register_forward_hook(clamp_time_step)
        self._limits_seen.add(tuple(mixer.time_step_limit))
        if self._limits_seen != {tuple(self.time_step_limit)}:
            raise NemolabError(f"mixers hold the time-step limits {self._limits_seen}, not {self.time_step_limit}")

    def _run_whole(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return block(hidden)

    def _step_through(self, block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        from transformers.cache_utils import DynamicCache

        cache = {cache_keyword(block): DynamicCache(config=self.config)}
        with one_thread():
            return torch.cat([block(hidden[:, t : t + 1], **cache) for t in range(hidden.shape[1])], dim=1)

    def _final_norm(self) -> torch.nn.Module:
        with torch.device("meta"):
            norm = self._modeling.NemotronHRMSNorm(self.config.hidden_size, eps=self.config.layer_norm_epsilon)
        weight = self.weights.tensor("backbone.norm_f.weight")
        check_shape("backbone.norm_f.weight", weight, norm.weight.shape)
        norm.load_state_dict({"weight": weight}, strict=True, assign=True)
        return norm

    def _read_head(self) -> torch.Tensor:
        if self._head is None:
            name = "lm_head.weight"
            if self.config.tie_word_embeddings and name not in self.weights:
                name = "backbone.embeddings.weight"
            head = self.weights.tensor(name)
            check_shape(name, head, (self.config.vocab_size, self.config.hidden_size))
            self._head = head
        return self._head

    def _check_everything_used(self) -> None:
        """After a whole pass nothing of the language model may be left over."""
        left = [name for name in self.weights.unused() if name.startswith(("backbone.", "lm_head."))]
        self.weights.check_all_claimed(left, "the language model")


class _RoutingGap:
    """While a block runs, note how close its routing was: a smaller gap than the rounding error may flip an expert.

    gap  [tokens] choice key of the last expert chosen minus that of the next one; None where the block has no router
    """

    def __init__(self, mixer: torch.nn.Module):
        self._gate = getattr(mixer, "gate", None)
        self.gap: torch.Tensor | None = None

    def __enter__(self) -> _RoutingGap:
        gate = self._gate
        if gate is not None and gate.num_group == 1 and gate.top_k < gate.num_experts:
            self._hook = gate.register_forward_hook(self._note)
        else:
            self._hook = None
        return self

    def _note(self, gate, inputs, outputs) -> None:
        keys = outputs[0].sigmoid() + gate.e_score_correction_bias
        best = keys.topk(gate.top_k + 1, dim=-1).values
        self.gap = best[:, -2] - best[:, -1]

    def __exit__(self, *exception) -> None:
        if self._hook is not None:
            self._hook.remove()


class _AddsNothing(torch.nn.Module):
    """Stands for the shared expert of a model that has none."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


def add_attention_biases(mixer: torch.nn.Module) -> None:
    """Projections with a bias in place of those without."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        plain = getattr(mixer, name)
        setattr(mixer, name, torch.nn.Linear(plain.in_features, plain.out_features, bias=True))


def transformers_config(config: ModelConfig):
    """transformers' config of the same model, in the implementations that a block on its own needs.

    Raises CheckpointError for what transformers cannot run.
    """
    if "moe" in config.layer_types and config.n_experts // config.n_group < 2:
        raise CheckpointError(
            f"config.json: {config.n_experts} experts in {config.n_group} group(s); transformers, the reference, weighs"
            " groups by their two best experts and cannot route fewer than 2 experts a group"
        )
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig

    shared = {field.name for field in dataclasses.fields(NemotronHConfig)} & {
        field.name for field in dataclasses.fields(config)
    }
    values = {name: getattr(config, name) for name in shared}
    values["layers_block_type"] = [LAYER_TYPES[kind] for kind in config.layer_types]
    values["num_nextn_predict_layers"] = 0  # MTP is no part of what is compared
    try:
        made = NemotronHConfig(**values)
    except Exception as error:  # whatever its strict dataclass raises, in its own words
        raise CheckpointError(f"transformers refuses this config.json: {error}") from error
    made._attn_implementation = "sdpa"
    made._experts_implementation = "eager"
    return made


@contextlib.contextmanager
def quiet_transformers():
    """Without its hints to install GPU kernels: the plain PyTorch paths are what a reference wants."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def one_thread():
    """One thread of arithmetic: for the work of one token the others cost more in waiting than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cache_keyword(block: torch.nn.Module) -> str:
    """Releases before 5.24 call the argument past_key_values."""
    return "cache" if "cache" in inspect.signature(block.forward).parameters else "past_key_values"


def inverse_softplus(value: float) -> float:
    """x with softplus(x) = value, for 0 <= value <= infinity."""
    if value == 0:
        return -math.inf
    return value if value > 30 else value + math.log(-math.expm1(-value))
