"""The tensors of two published checkpoints as (name, dtype, shape), written down from their published description.

Nothing here is derived from nemolab's own idea of a NemotronH: the counts and bytes others read from the real headers
(165,860 tensors and 80,297,329,824 bytes for Super, 24,147 and 19,339,781,632 for Nano) judge both.
"""

SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

SUPER_CONFIG = {
    "model_type": "nemotron_h", "hybrid_override_pattern": SUPER_PATTERN, "num_hidden_layers": 88, "hidden_size": 4096,
    "vocab_size": 131072, "intermediate_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "n_routed_experts": 512, "num_experts_per_tok": 22, "n_shared_experts": 1,
    "moe_intermediate_size": 2688, "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0, "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1,
}  # fmt: skip
NANO_CONFIG = {
    "model_type": "nemotron_h", "hybrid_override_pattern": NANO_PATTERN, "num_hidden_layers": 52, "hidden_size": 2688,
    "vocab_size": 131072, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
}  # fmt: skip

# Layers of Super whose modules are FP8 (in_proj and out_proj of Mamba layers).
SUPER_FP8_IN_PROJ = (
    0, 2, 4, 6, 9, 11, 13, 15, 18, 20, 27, 29, 31, 40, 49, 51, 53, 55, 57, 60, 62, 66, 68, 71, 73, 82, 84, 86,
)  # fmt: skip
SUPER_FP8_OUT_PROJ = (
    0, 2, 4, 9, 11, 13, 18, 38, 40, 42, 44, 49, 51, 53, 55, 57, 60, 62, 64, 66, 68, 71, 73, 75, 77, 80, 82, 84, 86,
)  # fmt: skip
NANO_PLAIN_MAMBA = (4, 11, 18, 25, 32, 41)


def super_tensors():
    """Nemotron-3-Super-120B-A12B-NVFP4: FP8 and NVFP4 mixed by layer, latent experts, one MTP block in BF16."""
    yield from _outside(131072, 4096)
    for layer, kind in enumerate(SUPER_PATTERN):
        mixer = f"backbone.layers.{layer}.mixer"
        yield f"backbone.layers.{layer}.norm.weight", "BF16", (4096,)
        if kind == "M":
            yield from _mamba_small(mixer, 128, 10240, 8192)
            yield from _linear(f"{mixer}.in_proj", 18560, 4096, "fp8" if layer in SUPER_FP8_IN_PROJ else "bf16")
            yield from _linear(f"{mixer}.out_proj", 4096, 8192, "fp8" if layer in SUPER_FP8_OUT_PROJ else "bf16")
        elif kind == "*":
            yield from _attention(mixer, "fp8" if layer in (69, 78) else "bf16")
            yield f"{mixer}.k_proj.k_scale", "F32", ()
            yield f"{mixer}.v_proj.v_scale", "F32", ()
        else:
            shared_down = {1: "nvfp4", 8: "bf16", 76: "bf16"}.get(layer, "fp8")
            formats = {
                "routed": "nvfp4",
                "shared_up": "bf16" if layer == 41 else "fp8",
                "shared_down": shared_down,
                "fc1": "fp8" if layer in (1, 3, 5) else "bf16",
                "fc2": "fp8" if layer == 3 else "bf16",
            }
            yield from _super_moe(mixer, formats)
    yield from _super_mtp()


def nano_tensors():
    """Nemotron-3-Nano-30B-A3B-NVFP4: NVFP4 alone, no latent, F32 gates, no MTP."""
    yield from _outside(131072, 2688)
    for layer, kind in enumerate(NANO_PATTERN):
        mixer = f"backbone.layers.{layer}.mixer"
        yield f"backbone.layers.{layer}.norm.weight", "BF16", (2688,)
        if kind == "M":
            format = "bf16" if layer in NANO_PLAIN_MAMBA else "nvfp4"
            yield from _mamba_small(mixer, 64, 6144, 4096)
            yield from _linear(f"{mixer}.in_proj", 10304, 2688, format)
            yield from _linear(f"{mixer}.out_proj", 2688, 4096, format)
        elif kind == "*":
            for name, rows, columns in (("q", 4096, 2688), ("k", 256, 2688), ("v", 256, 2688), ("o", 2688, 4096)):
                yield from _linear(f"{mixer}.{name}_proj", rows, columns, "bf16")
        else:
            yield f"{mixer}.gate.weight", "F32", (128, 2688)
            yield f"{mixer}.gate.e_score_correction_bias", "F32", (128,)
            for expert in range(128):
                yield from _linear(f"{mixer}.experts.{expert}.up_proj", 1856, 2688, "nvfp4")
                yield from _linear(f"{mixer}.experts.{expert}.down_proj", 2688, 1856, "nvfp4")
            yield from _linear(f"{mixer}.shared_experts.up_proj", 3712, 2688, "nvfp4")
            yield from _linear(f"{mixer}.shared_experts.down_proj", 2688, 3712, "nvfp4")


def _outside(vocab, hidden):
    yield "backbone.embeddings.weight", "BF16", (vocab, hidden)
    yield "backbone.norm_f.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def _linear(module, rows, columns, format):
    if format == "nvfp4":
        yield f"{module}.weight", "U8", (rows, columns // 2)
        yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
        yield f"{module}.weight_scale_2", "F32", ()
        yield f"{module}.input_scale", "F32", ()
    elif format == "fp8":
        yield f"{module}.weight", "F8_E4M3", (rows, columns)
        yield f"{module}.weight_scale", "F32", ()
        yield f"{module}.input_scale", "F32", ()
    else:
        yield f"{module}.weight", "BF16", (rows, columns)


def _mamba_small(mixer, heads, conv_dim, inner):
    for name in ("A_log", "D", "dt_bias"):
        yield f"{mixer}.{name}", "BF16", (heads,)
    yield f"{mixer}.conv1d.weight", "BF16", (conv_dim, 1, 4)
    yield f"{mixer}.conv1d.bias", "BF16", (conv_dim,)
    yield f"{mixer}.norm.weight", "BF16", (inner,)


def _attention(mixer, o_format):
    for name, rows in (("q", 4096), ("k", 256), ("v", 256)):
        yield from _linear(f"{mixer}.{name}_proj", rows, 4096, "bf16")
    yield from _linear(f"{mixer}.o_proj", 4096, 4096, o_format)


def _super_moe(mixer, formats):
    yield f"{mixer}.gate.weight", "BF16", (512, 4096)
    yield f"{mixer}.gate.e_score_correction_bias", "F32", (512,)
    for expert in range(512):
        yield from _linear(f"{mixer}.experts.{expert}.up_proj", 2688, 1024, formats["routed"])
        yield from _linear(f"{mixer}.experts.{expert}.down_proj", 1024, 2688, formats["routed"])
    yield from _linear(f"{mixer}.shared_experts.up_proj", 5376, 4096, formats["shared_up"])
    yield from _linear(f"{mixer}.shared_experts.down_proj", 4096, 5376, formats["shared_down"])
    yield from _linear(f"{mixer}.fc1_latent_proj", 1024, 4096, formats["fc1"])
    yield from _linear(f"{mixer}.fc2_latent_proj", 4096, 1024, formats["fc2"])


def _super_mtp():
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.layers.0.{name}.weight", "BF16", (4096,)
    yield "mtp.layers.0.eh_proj.weight", "BF16", (4096, 8192)
    yield from _attention("mtp.layers.0.mixer", "bf16")
    for name in ("norm", "final_layernorm"):
        yield f"mtp.layers.1.{name}.weight", "BF16", (4096,)
    yield from _super_moe(
        "mtp.layers.1.mixer", dict.fromkeys(("routed", "shared_up", "shared_down", "fc1", "fc2"), "bf16")
    )
