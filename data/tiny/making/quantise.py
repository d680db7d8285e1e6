"""The stored formats, and writing the checkpoint in the vendor's form.

    python quantise.py TRAINED TOKENS TARGET     (TRAINED: folder that train.py wrote; TOKENS: folder of tokens.py)

Routed experts NVFP4; Mamba projections and shared experts FP8 in most layers; the rest BF16, with the router and its
correction bias in F32. Training rounds with the same functions, so what is written is what
was trained.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch

GROUP = 16
E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0
SHARD_BYTES = 9_000_000
# as in the vendor's mixed checkpoints, some modules of a kind stay BF16: (layer, parameter)
KEPT_BF16 = {
    (0, "in_proj"),
    (12, "in_proj"),
    (12, "out_proj"),
    (1, "shared_down"),
    (8, "shared_up"),
    (8, "shared_down"),
}
FP8_PARAMETERS = {"in_proj", "out_proj", "shared_up", "shared_down"}
F32_PARAMETERS = {"gate"}
NAMES = {
    "norm": "norm.weight", "in_proj": "mixer.in_proj.weight", "conv1d": "mixer.conv1d.weight",
    "conv1d_bias": "mixer.conv1d.bias", "dt_bias": "mixer.dt_bias", "A_log": "mixer.A_log", "D": "mixer.D",
    "gated_norm": "mixer.norm.weight", "out_proj": "mixer.out_proj.weight", "q_proj": "mixer.q_proj.weight",
    "k_proj": "mixer.k_proj.weight", "v_proj": "mixer.v_proj.weight", "o_proj": "mixer.o_proj.weight",
    "gate": "mixer.gate.weight", "fc1_latent_proj": "mixer.fc1_latent_proj.weight",
    "fc2_latent_proj": "mixer.fc2_latent_proj.weight", "shared_up": "mixer.shared_experts.up_proj.weight",
    "shared_down": "mixer.shared_experts.down_proj.weight",
}  # fmt: skip


def stored_format(layer: int, parameter: str, pattern: str) -> str:
    """`nvfp4`, `fp8`, `f32` or `bf16`."""
    if pattern[layer] == "E" and parameter in ("up_proj", "down_proj"):
        return "nvfp4"
    if parameter in F32_PARAMETERS:
        return "f32"
    return "fp8" if parameter in FP8_PARAMETERS and (layer, parameter) not in KEPT_BF16 else "bf16"


def nvfp4_scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales (..., N, K/16) as E4M3 and one global scale a matrix (..., 1, 1), from (..., N, K) fp32."""
    blocks = weight.unflatten(-1, (-1, GROUP))
    scale_2 = weight.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / (E2M1_LARGEST * E4M3_LARGEST)
    scale = blocks.abs().amax(-1) / E2M1_LARGEST / scale_2
    # an all-zero block gets scale 1, so that no scale is zero
    scale = torch.where(scale == 0, torch.ones_like(scale), scale.clamp(2.0**-9, E4M3_LARGEST))
    return scale.to(torch.float8_e4m3fn), scale_2


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code (|x| at most 6)."""
    size = x.abs()
    small, middle, large = torch.round(size * 2) / 2, torch.round(size), torch.round(size / 2) * 2
    return torch.copysign(torch.where(size < 2, small, torch.where(size < 4, middle, large)), x)


def round_nvfp4(weight: torch.Tensor) -> torch.Tensor:
    """The values that NVFP4 can hold nearest to `weight` (..., N, K); same numbers as encode_nvfp4 stores."""
    weight = weight.float()
    scale, scale_2 = nvfp4_scales(weight)
    step = (scale.float() * scale_2)[..., None]
    blocks = weight.unflatten(-1, (-1, GROUP))
    return (nearest_e2m1((blocks / step).clamp(-E2M1_LARGEST, E2M1_LARGEST)) * step).flatten(-2)


def encode_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, K) -> packed (N, K/2) uint8, even column in the low nibble; scales (N, K/16) E4M3; scale_2 scalar fp32."""
    weight = weight.float()
    scale, scale_2 = nvfp4_scales(weight)
    step = (scale.float() * scale_2)[..., None]
    blocks = weight.unflatten(-1, (-1, GROUP))
    value = nearest_e2m1((blocks / step).clamp(-E2M1_LARGEST, E2M1_LARGEST)).flatten(-2)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    code = torch.searchsorted(magnitudes, value.abs().contiguous()) + 8 * torch.signbit(value)
    code = code.to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale, scale_2.reshape(())


def round_fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.float().abs().amax() / E4M3_LARGEST
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def encode_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) -> E4M3 (N, K) and one scale (scalar fp32) for the tensor."""
    scale = weight.float().abs().amax() / E4M3_LARGEST
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale.reshape(())


ROUND = {
    "nvfp4": round_nvfp4, "fp8": round_fp8, "bf16": lambda weight: weight.bfloat16().float(), "f32": torch.Tensor.float,
}  # fmt: skip


def vendor_tensors(
    trained: dict[str, torch.Tensor], pattern: str, largest: dict[str, float]
) -> dict[str, torch.Tensor]:
    """All tensors under the vendor's names. `trained` as train.py saved it, `largest` = activation maxima by module."""
    out = {
        "backbone.embeddings.weight": trained["embeddings"].bfloat16(),
        "backbone.norm_f.weight": trained["norm_f"].bfloat16(),
        "lm_head.weight": trained["lm_head"].bfloat16(),
    }
    moe_index = 0
    for layer, kind in enumerate(pattern):
        parameters = {key.split(".")[2]: value for key, value in trained.items() if key.startswith(f"layers.{layer}.")}
        for name, weight in parameters.items():
            form = stored_format(layer, name, pattern)
            if form == "nvfp4":
                for expert in range(weight.shape[0]):
                    module = f"backbone.layers.{layer}.mixer.experts.{expert}.{name}"
                    packed, scale, scale_2 = encode_nvfp4(weight[expert])
                    out[f"{module}.weight"], out[f"{module}.weight_scale"] = packed, scale
                    out[f"{module}.weight_scale_2"] = scale_2
                    out[f"{module}.input_scale"] = torch.tensor(largest[module] / (E2M1_LARGEST * E4M3_LARGEST))
                continue
            full = f"backbone.layers.{layer}.{NAMES[name]}"
            if form == "fp8":
                module = full.removesuffix(".weight")
                out[full], out[f"{module}.weight_scale"] = encode_fp8(weight)
                out[f"{module}.input_scale"] = torch.tensor(largest[module] / E4M3_LARGEST)
            else:
                out[full] = weight.float() if form == "f32" else weight.bfloat16()
        if kind == "E":
            out[f"backbone.layers.{layer}.mixer.gate.e_score_correction_bias"] = trained["bias"][moe_index].float()
            moe_index += 1
    return {name: tensor.detach().cpu().contiguous() for name, tensor in out.items()}


def quantised_layers(tensors: dict[str, torch.Tensor]) -> dict[str, dict]:
    """The metadata's list: module -> algorithm."""
    return {
        name.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": GROUP} if tensor.dtype == torch.uint8
        else {"quant_algo": "FP8"}
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dtype in (torch.uint8, torch.float8_e4m3fn)
    }  # fmt: skip


def model_config(shape, layers: dict[str, dict]) -> dict:
    """config.json in the vendor's spelling, with quantisation metadata (hf_quant_config.json is its second form)."""
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    targets = {
        algo: [name for name, entry in layers.items() if entry["quant_algo"] == algo] for algo in ("FP8", "NVFP4")
    }
    return {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "dtype": "bfloat16",
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": len(shape.pattern),
        "hybrid_override_pattern": shape.pattern, "tie_word_embeddings": False, "intermediate_size": shape.shared_inter,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 4096,
        "mamba_num_heads": shape.mamba_heads, "mamba_head_dim": shape.mamba_head_dim, "ssm_state_size": shape.state,
        "n_groups": shape.groups, "conv_kernel": shape.conv, "chunk_size": shape.chunk, "expand": 2,
        "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "mamba_hidden_act": "silu",
        "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")],
        "n_routed_experts": shape.experts, "num_experts_per_tok": shape.top_k, "n_shared_experts": 1,
        "moe_intermediate_size": shape.expert_inter, "moe_latent_size": shape.latent,
        "moe_shared_expert_intermediate_size": shape.shared_inter, "mlp_hidden_act": "relu2", "mlp_bias": False,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": shape.scaling,
        "layer_norm_epsilon": 1e-05, "residual_in_fp32": False, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "quantization_config": {
            "config_groups": {
                "group_0": {"input_activations": fp8, "weights": fp8, "targets": targets["FP8"]},
                "group_1": {"input_activations": fp4, "weights": fp4, "targets": targets["NVFP4"]},
            },
            "quantized_layers": layers, "ignore": [], "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": None,
            "producer": {"name": "modelopt", "version": "0.0+nemolab"}, "quant_method": "modelopt",
        },
    }  # fmt: skip


def write_shards(tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Shards of at most 9 MB with an index; a shard may end within an expert, as in the vendor's files."""
    from safetensors.torch import save_file

    shards, used = [{}], 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() + len(name) + 80  # header included
        if used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    experts = {}
    for name, file in weight_map.items():
        match = re.match(r"(.*experts\.\d+)\.", name)
        if match:
            experts.setdefault(match[1], set()).add(file)
    straddling = [name for name, files in experts.items() if len(files) > 1]
    print(f"{len(tensors)} tensors, {total} bytes, {len(shards)} shards; experts in two shards: {straddling}")


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def largest_activations(trained: dict[str, torch.Tensor], tokens: Path, device: str) -> dict[str, float]:
    """The largest absolute input of every quantised module over 48 held-out windows of 512 tokens."""
    from calibrate import collect

    ids = torch.from_numpy(np.fromfile(tokens / "val.bin", dtype=np.uint16).astype(np.int64))
    windows = ids[: len(ids) // 512 * 512].view(-1, 512)
    chosen = windows[torch.linspace(0, len(windows) - 1, 48).long()].to(device)
    return collect(trained, chosen)


def main() -> None:
    from safetensors.torch import load_file

    from model import Shape

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    target = arguments.target
    target.mkdir(parents=True, exist_ok=True)
    trained = load_file(arguments.trained / "trained.safetensors", device=arguments.device)
    shape = Shape(**json.loads((arguments.trained / "shape.json").read_text()))
    largest = largest_activations(trained, arguments.tokens, arguments.device)
    tensors = vendor_tensors(trained, shape.pattern, largest)
    layers = quantised_layers(tensors)
    write_shards(tensors, target)
    config = model_config(shape, layers)
    write_json(target / "config.json", config, indent=1)
    producer = config["quantization_config"]["producer"]
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    write_json(target / "hf_quant_config.json", {"producer": producer, "quantization": quantization}, indent=1)
    write_json(
        target / "generation_config.json",
        {
            "bos_token_id": 1,
            "eos_token_id": [2, 11],
            "pad_token_id": 0,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 0.95,
        },
        indent=1,
    )
    (target / "tokenizer.json").write_text((arguments.tokens / "tokenizer.json").read_text())
    special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "<unk>"}
    write_json(target / "special_tokens_map.json", special, indent=1)
    write_json(
        target / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "clean_up_tokenization_spaces": False,
         "add_bos_token": False, "add_eos_token": False, **special},
        indent=1,
    )  # fmt: skip
    template = Path(__file__).parent.parent / "chat_template.jinja"
    (target / "chat_template.jinja").write_text(template.read_text())


if __name__ == "__main__":
    main()
