"""Small checkpoints in the vendor's form with random weights, for tests: any shape, any mix of formats, several shards.

Weights are fan-in scaled and embeddings have a spread of 1, so that wrong bytes change the logits (with a default
initialisation swapped nibbles would go unnoticed). Each tensor is drawn from a seed of its own name: changing the
format of one part leaves the weights of the others as they were.
"""

import atexit
import json
import math
import shutil
import tempfile
import zlib
from functools import cache, wraps
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemolab.checkpoint.formats import encode_fp8, encode_nvfp4

SPECIAL_TOKENS = {
    0: "<unk>", 1: "<s>", 2: "</s>", 10: "<|im_start|>", 11: "<|im_end|>", 12: "<think>", 13: "</think>",
}  # fmt: skip
SMALLEST_VOCAB = 32 + 256  # reserved ids, then one token a byte

WORDS = {
    "layers_block_type": {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"},
    "layer_types": {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"},
}
FLOAT_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

CHAT_TEMPLATE = """\
{%- set think = enable_thinking if enable_thinking is defined else true -%}
{%- if messages[0].role != "system" %}<|im_start|>system
<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}<think></think>{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% else %}<think></think>{% endif %}{% endif -%}
"""


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


@one_thread
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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(seed, scalar_shape, input_scale, dict(overrides or {}))
    config = _config(locals())
    writer.plain("backbone.embeddings.weight", writer.draw("embeddings", (vocab, hidden), 1.0), embeddings)
    for layer, kind in enumerate(pattern):
        name = f"backbone.layers.{layer}"
        writer.norm(f"{name}.norm.weight", hidden)
        if kind == "M":
            _write_mamba(
                writer, f"{name}.mixer", hidden, mamba_heads, mamba_head_dim, state, n_groups, conv_kernel, mamba
            )
        elif kind == "*":
            _write_attention(writer, f"{name}.mixer", hidden, heads, kv_heads, head_dim, attention, kv_scales)
        elif kind == "E":
            sizes = hidden, latent, inter, experts, shared_inter
            _write_moe(writer, f"{name}.mixer", sizes, routed, shared, latent_format, gate)
        else:
            writer.linear(f"{name}.mixer.up_proj", mlp_inter, hidden, mlp)
            writer.linear(f"{name}.mixer.down_proj", hidden, mlp_inter, mlp)
    writer.norm("backbone.norm_f.weight", hidden)
    if not tie:
        writer.linear("lm_head", vocab, hidden, head)
    if mtp:
        _write_mtp(writer, hidden, latent, inter, experts, shared_inter, heads, kv_heads, head_dim, mtp)
    if vision:
        _write_vision(writer, hidden, vision)
    renamed = {_stored_name(name, prefix): tensor for name, tensor in writer.tensors.items()}
    formats = {_stored_name(name, prefix): format for name, format in writer.formats.items()}
    _write_files(folder, renamed, 1 if single_file else shards, with_index=not single_file)
    _write_metadata(folder, config, formats, metadata, uniform)
    write_small_files(folder, vocab)
    return folder


@cache
def _made_once(arguments):
    parent = tempfile.mkdtemp(prefix="nemolab-synthetic-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return write_checkpoint(Path(parent) / "model", **dict(arguments))


def copy_checkpoint(folder, **arguments) -> Path:
    """write_checkpoint for tests that spoil what they get: written once a process, then copied."""
    return Path(shutil.copytree(_made_once(tuple(sorted(arguments.items()))), folder))


class _Writer:
    """Collects named tensors; draws, encodes and remembers the format of every linear module."""

    def __init__(self, seed, scalar_shape, input_scale, overrides):
        self.seed, self.scalar_shape = seed, tuple(scalar_shape)
        self.input_scale, self.overrides = input_scale, overrides
        self.tensors: dict[str, torch.Tensor] = {}
        self.formats: dict[str, str] = {}

    def draw(self, name, shape, spread):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), self.seed))
        return torch.randn(shape, generator=generator) * spread

    def plain(self, name, tensor, format="bf16"):
        self.tensors[name] = tensor.to(FLOAT_DTYPES[format]).contiguous()

    def norm(self, name, width):
        self.plain(name, 1 + self.draw(name, (width,), 0.1))

    def linear(self, module, rows, columns, format, odd=False):
        """A matrix with a spread of 1/sqrt(columns), stored in `format`. `odd`: with the rare codes and scales."""
        format = self.overrides.get(module, format)
        weight = self.draw(module, (rows, columns), columns**-0.5)
        if odd:
            weight[0, :16] = 0.0  # a block of zeros gets the scale 1.0
            weight[1, :16] *= 1e-7  # a block far below the rest gets the smallest scale, 2^-9
        self.formats[module] = format
        if format == "nvfp4":
            # Another factor for every matrix, up to 32 times apart: whoever uses a neighbour's scale_2 is found out.
            stretch = 2.0 ** (zlib.crc32(module.encode()) % 6)
            scale_2 = weight.abs().amax() / (6 * 448) * stretch
            packed, scales, scale_2 = encode_nvfp4(weight, scale_2)
            self.tensors |= {f"{module}.weight": packed, f"{module}.weight_scale": scales}
            self._scalar(f"{module}.weight_scale_2", scale_2)
        elif format == "fp8":
            self.tensors[f"{module}.weight"], scale = encode_fp8(weight)
            self._scalar(f"{module}.weight_scale", scale)
        else:
            self.plain(f"{module}.weight", weight, format)
        if format in ("nvfp4", "fp8") and self.input_scale:
            self._scalar(f"{module}.input_scale", torch.tensor(0.01))

    def _scalar(self, name, value):
        self.tensors[name] = value.float().reshape(self.scalar_shape).clone()


def _write_mamba(writer, mixer, hidden, heads, head_dim, state, n_groups, conv_kernel, format):
    inner = heads * head_dim
    conv_dim = inner + 2 * n_groups * state
    steps = torch.exp(torch.linspace(math.log(1e-3), math.log(1e-1), heads))
    writer.plain(f"{mixer}.dt_bias", torch.log(torch.expm1(steps)))
    writer.plain(f"{mixer}.A_log", torch.log(torch.arange(1, heads + 1).float()))
    writer.plain(f"{mixer}.D", torch.ones(heads))
    writer.plain(
        f"{mixer}.conv1d.weight", writer.draw(f"{mixer}.conv1d", (conv_dim, 1, conv_kernel), conv_kernel**-0.5)
    )
    writer.plain(f"{mixer}.conv1d.bias", writer.draw(f"{mixer}.conv1d.bias", (conv_dim,), 0.1))
    writer.norm(f"{mixer}.norm.weight", inner)
    writer.linear(f"{mixer}.in_proj", inner + conv_dim + heads, hidden, format)
    writer.linear(f"{mixer}.out_proj", hidden, inner, format)


def _write_attention(writer, mixer, hidden, heads, kv_heads, head_dim, format, kv_scales=False):
    rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    for name, count in rows.items():
        writer.linear(f"{mixer}.{name}", count, hidden, format)
    writer.linear(f"{mixer}.o_proj", hidden, heads * head_dim, format)
    if kv_scales:
        writer.tensors[f"{mixer}.k_proj.k_scale"] = torch.tensor(1.0)
        writer.tensors[f"{mixer}.v_proj.v_scale"] = torch.tensor(1.0)


def _write_moe(writer, mixer, sizes, routed, shared, latent_format, gate):
    hidden, latent, inter, experts, shared_inter = sizes
    width = latent or hidden
    writer.plain(f"{mixer}.gate.weight", writer.draw(f"{mixer}.gate", (experts, hidden), hidden**-0.5), gate)
    bias = writer.draw(f"{mixer}.gate.bias", (experts,), 0.02)
    writer.plain(f"{mixer}.gate.e_score_correction_bias", bias, "f32")
    for expert in range(experts):
        writer.linear(f"{mixer}.experts.{expert}.up_proj", inter, width, routed, odd=True)
        writer.linear(f"{mixer}.experts.{expert}.down_proj", width, inter, routed, odd=True)
    writer.linear(f"{mixer}.shared_experts.up_proj", shared_inter, hidden, shared)
    writer.linear(f"{mixer}.shared_experts.down_proj", hidden, shared_inter, shared)
    if latent:
        writer.linear(f"{mixer}.fc1_latent_proj", latent, hidden, latent_format)
        writer.linear(f"{mixer}.fc2_latent_proj", hidden, latent, latent_format)


def _write_mtp(writer, hidden, latent, inter, experts, shared_inter, heads, kv_heads, head_dim, mtp):
    for name in ("enorm", "hnorm", "norm"):
        writer.norm(f"mtp.layers.0.{name}.weight", hidden)
    writer.linear("mtp.layers.0.eh_proj", hidden, 2 * hidden, "bf16")
    _write_attention(writer, "mtp.layers.0.mixer", hidden, heads, kv_heads, head_dim, "bf16")
    for name in ("norm", "final_layernorm"):
        writer.norm(f"mtp.layers.1.{name}.weight", hidden)
    routed = "nvfp4" if mtp == "nvfp4" else "bf16"
    _write_moe(
        writer, "mtp.layers.1.mixer", (hidden, latent, inter, experts, shared_inter), routed, "bf16", "bf16", "bf16"
    )


def _write_vision(writer, hidden, names):
    width = 32
    if names == "timm":
        tower = "vision_model.radio_model"
        block = f"{tower}.model.blocks.0"
        matrices = {f"{block}.attn.qkv": 3 * width, f"{block}.attn.proj": width, f"{block}.mlp.fc1": 4 * width}
        matrices |= {f"{tower}.model.patch_generator.embedder": width, "mlp1.1": 4 * width, "mlp1.3": hidden}
        lone = {f"{tower}.model.patch_generator.cls_token.token": (10, width), "mlp1.0.weight": (width,)}
        summary = f"{tower}.summary_idxs"
    else:
        block = "vision_model.encoder.layer.0"
        matrices = {f"{block}.attention.attention.{name}": width for name in ("query", "key", "value")}
        matrices |= {"vision_projector.mlp1.linear1": 4 * width, "vision_projector.mlp1.linear2": hidden}
        lone = {f"{block}.layer_scale1.lambda1": (width,), "vision_model.embeddings.cls_register_token": (1, 10, width)}
        summary = "vision_model.summary_idxs"
    for module, rows in matrices.items():
        writer.linear(module, rows, width, "bf16")
    for name, shape in lone.items():
        writer.plain(name, writer.draw(name, shape, 1.0))
    writer.tensors[summary] = torch.tensor([0, 1])
    writer.norm("vision_projector.vision_final_layernorm.weight", width)


def _stored_name(name, prefix):
    """A canonical name as a checkpoint with another prefix stores it."""
    root = "language_model." if prefix.startswith("language_model.") else ""
    if name.startswith("backbone."):
        return prefix + name.removeprefix("backbone.")
    return root + name if name.startswith(("lm_head", "mtp.")) else name


def _config(given):
    """config.json of the vendor's form, from the arguments of write_checkpoint."""
    pattern, spelling = given["pattern"], given["layer_spelling"]
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "torch_dtype": "bfloat16",
        "hidden_size": given["hidden"], "num_hidden_layers": len(pattern), "vocab_size": given["vocab"],
        "tie_word_embeddings": given["tie"], "intermediate_size": given["mlp_inter"],
        "num_attention_heads": given["heads"], "num_key_value_heads": given["kv_heads"], "head_dim": given["head_dim"],
        "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_conv_bias": True, "mamba_proj_bias": False,
        "mamba_num_heads": given["mamba_heads"], "mamba_head_dim": given["mamba_head_dim"],
        "ssm_state_size": given["state"], "n_groups": given["n_groups"], "conv_kernel": given["conv_kernel"],
        "chunk_size": 16, "expand": 2, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2",
        "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4,
        "n_routed_experts": given["experts"], "num_experts_per_tok": given["top_k"], "n_shared_experts": 1,
        "moe_intermediate_size": given["inter"], "moe_shared_expert_intermediate_size": given["shared_inter"],
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-5, "residual_in_fp32": False, "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if given["latent"]:
        config["moe_latent_size"] = given["latent"]
    if spelling == "pattern":
        config["hybrid_override_pattern"] = pattern
    else:
        config[spelling] = [WORDS[spelling][letter] for letter in pattern]
    if given["mtp"]:
        config |= {"mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1}
    config |= given["config_extra"] or {}
    if given["prefix"].startswith("language_model."):
        return {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni", "llm_config": config}
    return config


def _write_files(folder, tensors, count, with_index):
    """Shards of about equal bytes; every boundary is moved to the nearest place between two tensors of one expert."""
    names = list(tensors)
    ends = list(accumulate(tensors[name].numel() * tensors[name].element_size() for name in names))
    places = [place for place in range(1, len(names)) if _cuts_an_expert(names, place)] or list(range(1, len(names)))
    cuts = set()
    for number in range(1, count):
        target = ends[-1] * number / count
        cuts.add(min(set(places) - cuts, key=lambda place: abs(ends[place - 1] - target)))
    files = [names[start:stop] for start, stop in pairwise([0, *sorted(cuts), len(names)])]
    weight_map = {}
    for number, members in enumerate(files, 1):
        numbered = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file = "model.safetensors" if count == 1 and not with_index else numbered
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    if with_index:
        index = {"metadata": {"total_size": ends[-1]}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _cuts_an_expert(names, place):
    before, after = (names[i].rpartition("_proj.")[0].rpartition(".")[0] for i in (place - 1, place))
    return before == after and ".experts." in before


def _write_metadata(folder, config, formats, metadata, uniform):
    """Either form of the quantisation metadata, both or neither; and config.json, which may hold one of them."""
    algorithms = {"nvfp4": {"quant_algo": "NVFP4", "group_size": 16}, "fp8": {"quant_algo": "FP8"}}
    table = {name: algorithms[format] for name, format in formats.items() if format in algorithms}
    plain = [name for name, format in formats.items() if format not in algorithms]
    producer = {"name": "modelopt", "version": "0.0 (synthetic)"}
    if uniform:
        flat = {"quant_algo": "NVFP4", "ignore": plain}
        inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": plain}
    else:
        flat = {"quant_algo": "MIXED_PRECISION", "quantized_layers": table, "ignore": []}
        inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": table}
    if metadata in ("both", "config"):
        config = config | {"quantization_config": flat | {"quant_method": "modelopt", "producer": producer}}
    if metadata in ("both", "hf_quant"):
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": producer, "quantization": inner}, indent=1)
        )
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_small_files(folder, vocab=SMALLEST_VOCAB):
    """A byte-level tokenizer (one token a byte, the vendor's special ids), chat template and generation config."""
    if vocab < SMALLEST_VOCAB:
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of {SMALLEST_VOCAB}, found {vocab}")
    tokens = [SPECIAL_TOKENS.get(id, f"<SPECIAL_{id}>") for id in range(32)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<unk>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    generation = {"bos_token_id": 1, "eos_token_id": [2, 11], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
