"""Other people's quantised forms, known by how their tensors are named: to refuse them by what they are."""

import re

_COMPRESSED = "compressed-tensors (its global scale is a divisor)"

# Last part of a name -> what it belongs to. Loading one of these as ModelOpt's gives silent nonsense.
_ENDINGS = {
    "weight_packed": _COMPRESSED,
    "weight_global_scale": _COMPRESSED,
    "input_global_scale": _COMPRESSED,
    "weight_shape": "compressed-tensors",
    "weight_g_idx": "compressed-tensors",
    "weight_zero_point": "an integer quantisation with zero points",
    "zero_point": "an integer quantisation with zero points",
    "weight_scale_inv": "block-wise FP8 (DeepSeek's form)",
    "scale_inv": "block-wise FP8 (DeepSeek's form)",
    "pre_quant_scale": "AWQ (activations would need its pre_quant_scale)",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "absmax": "bitsandbytes",
    "nested_absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "nested_quant_map": "bitsandbytes",
    "SCB": "bitsandbytes",
    "weight_format": "bitsandbytes",
    "W_q": "HQQ",
    "_data": "quanto",
    "weights_scaling_factor": "a TensorRT-LLM checkpoint (weights_scaling_factor)",
    "weights_scaling_factor_2": "a TensorRT-LLM checkpoint (weights_scaling_factor_2)",
    "activation_scaling_factor": "a TensorRT-LLM checkpoint (activation_scaling_factor)",
}
_PATTERNS = (
    (re.compile(r"(^|_)proj_(blocks|scales)$"), "MXFP4 (gpt-oss's form)"),
    (re.compile(r"^bitsandbytes__"), "bitsandbytes"),
)
_STACKED = re.compile(r"\.experts\.(up_proj|down_proj|gate_up_proj)(\.weight)?$")


def foreign_form(name: str) -> str | None:
    """What a tensor of this name belongs to, or None where the name says nothing."""
    if _STACKED.search(name):
        return (
            "the stacked form transformers keeps in memory (all experts in one tensor; save_pretrained unstacks them)"
        )
    ending = name.rpartition(".")[2]
    return _ENDINGS.get(ending) or next((form for pattern, form in _PATTERNS if pattern.search(ending)), None)
