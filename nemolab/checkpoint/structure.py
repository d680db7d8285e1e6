"""What a NemotronH checkpoint must hold, by its config: every module, its part of the model and its logical shape."""

from dataclasses import dataclass

from nemolab.checkpoint.config import ModelConfig

PARTS = (
    "routed", "shared", "mamba", "attention", "router", "latent", "mlp", "norm", "embeddings", "head", "mtp", "vision",
)  # fmt: skip
# Recognised and counted; neither run nor stored.
LEFT_OUT_PARTS = ("mtp", "vision")

EMBEDDINGS = "backbone.embeddings"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Expected:
    """One module a config asks for. `leaf`: the parameter itself has this name (A_log), no ".weight" after it."""

    part: str
    shape: tuple[int, ...]
    bias: bool = False
    leaf: bool = False


def expect_modules(config: ModelConfig) -> dict[str, Expected]:
    """Canonical module name -> what the config promises; the language model without MTP, no lm_head if it is tied."""
    hidden, vocab = config.hidden_size, config.vocab_size
    expected = {EMBEDDINGS: Expected("embeddings", (vocab, hidden))}
    for index, kind in enumerate(config.layer_types):
        layer = f"backbone.layers.{index}"
        expected[f"{layer}.norm"] = Expected("norm", (hidden,))
        _BUILD[kind](expected, f"{layer}.mixer", config)
    expected["backbone.norm_f"] = Expected("norm", (hidden,))
    if not config.tie_word_embeddings:
        expected[HEAD] = Expected("head", (vocab, hidden))
    return expected


def expect_mtp(config: ModelConfig) -> dict[str, Expected]:
    """The same for one multi-token-prediction block, as the family stores it; empty where the config names none."""
    hidden, kinds = config.hidden_size, config.mtp_layer_types
    if config.num_nextn_predict_layers != 1 or not kinds:
        return {}
    expected = {f"mtp.layers.0.{name}": Expected("mtp", (hidden,)) for name in ("enorm", "hnorm")}
    expected["mtp.layers.0.eh_proj"] = Expected("mtp", (hidden, 2 * hidden))
    for index, kind in enumerate(kinds):
        expected[f"mtp.layers.{index}.norm"] = Expected("mtp", (hidden,))
        _BUILD[kind](expected, f"mtp.layers.{index}.mixer", config)
    expected[f"mtp.layers.{len(kinds) - 1}.final_layernorm"] = Expected("mtp", (hidden,))
    return expected


def _expect_mamba(expected: dict[str, Expected], mixer: str, config: ModelConfig) -> None:
    hidden, inner, conv_dim = config.hidden_size, config.mamba_inner, config.mamba_conv_dim
    for name in ("A_log", "D", "dt_bias"):
        expected[f"{mixer}.{name}"] = Expected("mamba", (config.mamba_num_heads,), leaf=True)
    expected[f"{mixer}.conv1d"] = Expected("mamba", (conv_dim, 1, config.conv_kernel), bias=config.use_conv_bias)
    expected[f"{mixer}.norm"] = Expected("mamba", (inner,))
    expected[f"{mixer}.in_proj"] = Expected("mamba", (config.mamba_in_rows, hidden), bias=config.use_bias)
    expected[f"{mixer}.out_proj"] = Expected("mamba", (hidden, inner), bias=config.use_bias)


def _expect_attention(expected: dict[str, Expected], mixer: str, config: ModelConfig) -> None:
    hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
    rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    expected[f"{mixer}.q_proj"] = Expected("attention", (rows, hidden), bias)
    expected[f"{mixer}.k_proj"] = Expected("attention", (kv_rows, hidden), bias)
    expected[f"{mixer}.v_proj"] = Expected("attention", (kv_rows, hidden), bias)
    expected[f"{mixer}.o_proj"] = Expected("attention", (hidden, rows), bias)


def _expect_moe(expected: dict[str, Expected], mixer: str, config: ModelConfig) -> None:
    hidden, inter, width, bias = config.hidden_size, config.expert_inter, config.expert_in, config.mlp_bias
    expected[f"{mixer}.gate"] = Expected("router", (config.n_experts, hidden))
    expected[f"{mixer}.gate.e_score_correction_bias"] = Expected("router", (config.n_experts,), leaf=True)
    up, down = Expected("routed", (inter, width)), Expected("routed", (width, inter))
    for expert in range(config.n_experts):
        expected[f"{mixer}.experts.{expert}.up_proj"] = up
        expected[f"{mixer}.experts.{expert}.down_proj"] = down
    if config.n_shared_experts:
        shared = config.moe_shared_expert_intermediate_size
        expected[f"{mixer}.shared_experts.up_proj"] = Expected("shared", (shared, hidden), bias)
        expected[f"{mixer}.shared_experts.down_proj"] = Expected("shared", (hidden, shared), bias)
    if config.moe_latent_size:
        expected[f"{mixer}.fc1_latent_proj"] = Expected("latent", (width, hidden), bias)
        expected[f"{mixer}.fc2_latent_proj"] = Expected("latent", (hidden, width), bias)


def _expect_mlp(expected: dict[str, Expected], mixer: str, config: ModelConfig) -> None:
    hidden, inter, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    expected[f"{mixer}.up_proj"] = Expected("mlp", (inter, hidden), bias)
    expected[f"{mixer}.down_proj"] = Expected("mlp", (hidden, inter), bias)


_BUILD = {"mamba": _expect_mamba, "attention": _expect_attention, "moe": _expect_moe, "mlp": _expect_mlp}
