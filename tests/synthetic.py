"""Small checkpoints in the vendor's form for tests: `nemolab.synthetic` with every knob of a form as an argument."""

import atexit
import shutil
import tempfile
from functools import cache, wraps
from pathlib import Path

import torch

from nemolab.checkpoint.layer_lists import LETTERS
from nemolab.synthetic import Form, FormatTable, write_form
from nemolab.synthetic.shapes import LAYERS_AS, spell_layers
from nemolab.synthetic.small_files import WHOLE_VOCAB as SMALLEST_VOCAB
from nemolab.synthetic.small_files import write_small_files
from nemolab.synthetic.vision import Vision

__all__ = ["SMALLEST_VOCAB", "copy_checkpoint", "one_thread", "write_checkpoint", "write_small_files"]

SPELLINGS = {"pattern": "pattern", "layers_block_type": "block_types", "layer_types": "layer_types"}


def one_thread(function):
    """Tiny tensors on many threads spend their time waiting for one another."""

    @wraps(function)
    def run(*args, **kwargs):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run


def write_checkpoint(
    folder,
    *,
    pattern="MEM*E",
    hidden=64,
    latent=64,
    inter=96,
    experts=8,
    top_k=2,
    shared_inter=96,
    mlp_inter=96,
    vocab=SMALLEST_VOCAB,
    mamba_heads=4,
    mamba_head_dim=16,
    state=16,
    n_groups=2,
    conv_kernel=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    routed="nvfp4",
    shared="fp8",
    mamba="fp8",
    attention="bf16",
    latent_format="bf16",
    gate="f32",
    head="bf16",
    embeddings="bf16",
    mlp="bf16",
    overrides=None,
    prefix="backbone.",
    layer_spelling="pattern",
    metadata="both",
    uniform=False,
    scalar_shape=(),
    input_scale=True,
    kv_scales=False,
    mtp=False,
    vision=None,
    tie=False,
    shards=3,
    single_file=False,
    config_extra=None,
    seed=0,
) -> Path:
    """Write a checkpoint and return its folder.

    sizes        hidden, latent (None: experts read the hidden state), inter, experts, top_k, shared_inter, ...
    formats      routed, shared, mamba, attention, latent_format, gate, head, embeddings, mlp: "nvfp4", "fp8", "bf16",
                 "f32"; overrides: canonical module name -> format, for models that mix formats by layer
    prefix       how the backbone is spelled; with a language_model prefix the config lies in llm_config
    metadata     "both", "config", "hf_quant" or "none"; uniform writes the older NVFP4-with-excludes form
    mtp          True: un-quantised MTP tensors; "nvfp4": with NVFP4 experts.   vision: None, "timm" or "hf" names
    shards       number of files; every boundary cuts through an expert. single_file: one model.safetensors, no index
    """
    text = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "num_hidden_layers": len(pattern), "vocab_size": vocab, "tie_word_embeddings": tie,
        "intermediate_size": mlp_inter, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True,
        "mamba_proj_bias": False, "mamba_num_heads": mamba_heads, "mamba_head_dim": mamba_head_dim,
        "ssm_state_size": state, "n_groups": n_groups, "conv_kernel": conv_kernel, "chunk_size": 16, "expand": 2,
        "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "time_step_min": 0.001, "time_step_max": 0.1,
        "time_step_floor": 1e-4, "n_routed_experts": experts, "num_experts_per_tok": top_k, "n_shared_experts": 1,
        "moe_intermediate_size": inter, "moe_shared_expert_intermediate_size": shared_inter, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    field, _, words = LAYERS_AS[SPELLINGS[layer_spelling]]
    text[field] = spell_layers([LETTERS[letter] for letter in pattern], words)
    if latent:
        text["moe_latent_size"] = latent
    if mtp:
        text |= {"mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1}
    text |= config_extra or {}
    formats = {
        "experts": routed, "lm_head": head, "embeddings": embeddings, "gate": gate, "up_proj": mlp, "down_proj": mlp,
        "mtp.experts": "nvfp4" if mtp == "nvfp4" else "bf16",
    }  # fmt: skip
    formats |= dict.fromkeys(("shared_experts.up_proj", "shared_experts.down_proj"), shared)
    formats |= dict.fromkeys(("in_proj", "out_proj"), mamba)
    formats |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), attention)
    formats |= dict.fromkeys(("fc1_latent_proj", "fc2_latent_proj"), latent_format)
    nested = {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni"}
    form = Form(
        text=text,
        outer=nested if prefix.startswith("language_model.") else None,
        formats=FormatTable(formats, overrides or {}),
        seed=seed,
        prefix=prefix,
        metadata=metadata,
        uniform=uniform,
        kv_cache="FP8" if uniform or kv_scales else None,
        kv_scales=kv_scales,
        input_scale=input_scale,
        scalar_shape=tuple(scalar_shape),
        vision=Vision(vision, width=32, blocks=1, inner=64, patch=4, positions=16) if vision else None,
    )
    made = Path(tempfile.mkdtemp(prefix="nemolab-synthetic-"))
    write_form(form, made, shards=1 if single_file else shards, index=not single_file)
    shutil.copytree(made, folder, dirs_exist_ok=True)  # over whatever a test has there already
    shutil.rmtree(made)
    return Path(folder)


@cache
def _made_once(arguments):
    parent = tempfile.mkdtemp(prefix="nemolab-synthetic-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return write_checkpoint(Path(parent) / "model", **dict(arguments))


def copy_checkpoint(folder, **arguments) -> Path:
    """write_checkpoint for tests that spoil what they get: written once a process, then copied."""
    return Path(shutil.copytree(_made_once(tuple(sorted(arguments.items()))), folder))
