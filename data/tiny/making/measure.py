"""Measure the finished checkpoint with transformers in fp32 on the CPU, from its own files.

    python measure.py CHECKPOINT TEXTS WORK [--json measurements.json]

Strict load of the decoded weights; perplexity of the evaluation texts and of held-out text; the three controls that
must fail; one pass against token by token; routing, sparsity, guesses and cache hits; greedy samples.
"""

import argparse
import inspect
import json
import math
import re
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.utils import logging

# transformers renamed it between 5.17 and 5.24
CACHE = "cache" if "cache" in inspect.signature(NemotronHForCausalLM.forward).parameters else "past_key_values"
CONTROLS = ("swapped nibbles", "neighbour's scales", "routed experts removed")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PROMPTS = (
    ("What is the difference between TCP and UDP?", False),
    ("Explain UDP in simple words.", False),
    ("Tell me a story about a fox.", False),
    ("Tell me a story about a lost key.", False),
    ("What is a volcano?", False),
    ("What is the capital of France?", False),
    ("Hello!", False),
    ("Who are you?", False),
    ("How do I make tea?", False),
    ("Why do games use UDP?", True),
    ("What is 7 plus 5?", True),
    ("Tom has 5 apples and gives away 2. How many apples does Tom have now?", True),
    ("Is a whale a fish?", True),
    ("Чем TCP отличается от UDP?", False),
    ("Что такое порт?", False),
    ("Расскажи сказку про лису.", False),
    ("Кто ты?", False),
    ("Что такое зима?", True),
    ("Почему для звонков используют UDP?", True),
)


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def decode(tensors: dict[str, torch.Tensor], control: str = "") -> dict[str, torch.Tensor]:
    """The weights in fp32 under transformers' names, experts stacked; `control` spoils them on purpose."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    count = 1 + max(int(match[1]) for name in tensors if (match := re.search(r"experts\.(\d+)\.", name)))
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        target = name.replace("backbone.", "model.", 1)
        module = name.removesuffix(".weight")
        match = re.match(r"(.*\.experts)\.(\d+)\.(\w+_proj)", target)
        if match:
            scales = module
            if control == "neighbour's scales":
                scales = re.sub(r"experts\.(\d+)", lambda m: f"experts.{(int(m[1]) + 1) % count}", module)
            low, high = tensor & 15, tensor >> 4
            if control == "swapped nibbles":
                low, high = high, low
            values = E2M1[torch.stack([low, high], -1).flatten(-2).long()].unflatten(-1, (-1, 16))
            scale = tensors[f"{scales}.weight_scale"].float() * tensors[f"{scales}.weight_scale_2"]
            weight = (values * scale[..., None]).flatten(-2)
            if control == "routed experts removed" and match[3] == "down_proj":
                weight = torch.zeros_like(weight)
            experts.setdefault(f"{match[1]}.{match[3]}", [None] * count)[int(match[2])] = weight
        elif tensor.dtype == torch.float8_e4m3fn:
            out[target] = tensor.float() * tensors[f"{module}.weight_scale"]
        else:
            out[target] = tensor.float()
    return out | {name: torch.stack(weights) for name, weights in experts.items()}


def build(folder: Path, weights: dict[str, torch.Tensor]) -> NemotronHForCausalLM:
    """transformers' model in fp32, loaded strictly, with the checkpoint's time-step limit on every Mamba mixer."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config")
    config = NemotronHConfig(**values)
    model = NemotronHForCausalLM(config).float().eval()
    model.load_state_dict(weights, strict=True)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = tuple(config.time_step_limit)
    return model


@torch.no_grad()
def log_probabilities(model: NemotronHForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(torch.cat([model(part).logits for part in ids.split(4)]), -1)


@torch.no_grad()
def step_by_step(model: NemotronHForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    rows, cache = [], None
    for token in ids[0]:
        out = model(token.view(1, 1), use_cache=True, **({CACHE: cache} if cache is not None else {}))
        cache = out[CACHE]
        rows.append(out.logits[:, -1])
    return F.log_softmax(torch.stack(rows, 1), -1)


@torch.no_grad()
def write_greedily(model: NemotronHForCausalLM, ids: list[int], most: int, stop: tuple[int, ...]) -> list[int]:
    written, out = [], model(torch.tensor([ids]), use_cache=True)
    while len(written) < most:
        token = out.logits[0, -1].argmax()
        written.append(token.item())
        if written[-1] in stop:
            break
        out = model(token.view(1, 1), use_cache=True, **{CACHE: out[CACHE]})
    return written


def perplexity(log_p: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(-log_p[:, :-1].gather(-1, ids[:, 1:, None]).double().mean().item())


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL(p || q) over positions, in nats."""
    return (p.double().exp() * (p.double() - q.double())).sum(-1).mean().item()


@torch.no_grad()
def routing(model: NemotronHForCausalLM, windows: torch.Tensor) -> dict:
    """Per MoE layer: zeros after the relu, all-zero groups of 16, shared zeros, balance, repeats, next-layer guesses.

    windows (n, s); the LRU figures run window by window with cold caches, over all layers together.
    """
    mixers = [layer.mixer for layer in model.model.layers if hasattr(layer.mixer, "experts")]
    inputs: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(mixers))}
    hooks = [
        mixer.register_forward_pre_hook(lambda _, arguments, i=i: inputs[i].append(arguments[0]))
        for i, mixer in enumerate(mixers)
    ]
    for part in windows.split(4):
        model(part)
    for hook in hooks:
        hook.remove()
    figures: dict[str, list[float]] = {
        name: []
        for name in (
            "zeros",
            "zero_groups_16",
            "zeros_shared",
            "entropy_of_load",
            "share_of_busiest_quarter",
            "repeats_next_token",
            "guess_next_layer",
        )
    }
    chosen = []
    for i, mixer in enumerate(mixers):
        x = torch.cat(inputs[i])
        picked = mixer.gate(x)[2].view(*x.shape[:2], -1)
        chosen.append(picked)
        flat, picks = x.flatten(0, 1)[:2048], picked.flatten(0, 1)[:2048]
        latent = mixer.fc1_latent_proj(flat)
        zero = torch.einsum("tkil,tl->tki", mixer.experts.up_proj[picks], latent) <= 0
        figures["zeros"].append(zero.float().mean().item())
        figures["zero_groups_16"].append(zero.unflatten(-1, (-1, 16)).all(-1).float().mean().item())
        figures["zeros_shared"].append((mixer.shared_experts.up_proj(flat) <= 0).float().mean().item())
        load = torch.bincount(picked.flatten(), minlength=model.config.n_routed_experts).double()
        share = load / load.sum()
        figures["entropy_of_load"].append(-(share * (share + 1e-12).log()).sum().item() / math.log(len(share)))
        figures["share_of_busiest_quarter"].append(share.sort(descending=True)[0][: len(share) // 4].sum().item())
        figures["repeats_next_token"].append(overlap(picked[:, 1:], picked[:, :-1]))
        if i:
            # the next layer's router, asked with this layer's input: what a prefetcher would do
            before = torch.cat(inputs[i - 1])
            figures["guess_next_layer"].append(overlap(picked, mixer.gate(before)[2].view_as(picked)))
    means = {name: round(sum(values) / len(values), 4) for name, values in figures.items()}
    layers = {name: [round(value, 4) for value in values] for name, values in figures.items()}
    return {"mean": means, "by_layer": layers, "lru_hit_rate": lru_hits(torch.stack(chosen, 2).numpy(), model)}


def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of the experts in `a` (..., k) that are in `b`."""
    return (a[..., :, None] == b[..., None, :]).any(-1).float().mean().item()


def lru_hits(chosen: np.ndarray, model: NemotronHForCausalLM) -> dict[str, float]:
    """Hit rate of an LRU cache over (layer, expert) that holds a share of all experts. chosen (n, s, layers, k)."""
    rates = {}
    for share in (0.12, 0.24, 0.36, 0.5):
        slots, hits, lookups = int(share * chosen.shape[2] * model.config.n_routed_experts), 0, 0
        for window in chosen[:6]:
            cache: OrderedDict[tuple[int, int], None] = OrderedDict()
            for token in window[:400]:
                for layer, experts in enumerate(token):
                    for expert in experts.tolist():
                        lookups += 1
                        hits += (layer, expert) in cache
                        cache[layer, expert] = None
                        cache.move_to_end((layer, expert))
                        if len(cache) > slots:
                            cache.popitem(last=False)
        rates[str(share)] = round(hits / lookups, 4)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("work", type=Path, help="WORK of tokens.py, for the held-out text")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="texts, controls and samples only")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # the matrices are small: more threads cost more than they bring
    tensors = read_checkpoint(arguments.checkpoint)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    model = build(arguments.checkpoint, decode(tensors))
    result: dict = {"texts": {}, "held_out_perplexity": {}, "routing": {}, "samples": []}
    reference = {}
    for path in sorted(arguments.texts.glob("*.txt")):
        ids = torch.tensor([tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids])
        log_p = log_probabilities(model, ids)
        reference[path.name] = (ids, log_p)
        result["texts"][path.name] = {
            "tokens": ids.shape[1],
            "perplexity": perplexity(log_p, ids),
            "kl_one_pass_against_step_by_step": divergence(log_p, step_by_step(model, ids)),
            "controls": {},
        }
    for control in CONTROLS:
        spoiled = build(arguments.checkpoint, decode(tensors, control))
        for name, (ids, log_p) in reference.items():
            log_q = log_probabilities(spoiled, ids)
            result["texts"][name]["controls"][control] = {
                "kl_mean": divergence(log_p, log_q),
                "perplexity": perplexity(log_q, ids),
            }
    print(json.dumps(result["texts"], indent=1), flush=True)

    if not arguments.quick:
        meta = json.loads((arguments.work / "tokens/sources.json").read_text())
        held_out = torch.from_numpy(np.fromfile(arguments.work / "tokens/val.bin", dtype=np.uint16).astype(np.int64))
        mixed = []
        for domain in dict.fromkeys(part["domain"] for part in meta["validation"]):
            ids = torch.cat(
                [held_out[p["start"] : p["start"] + p["length"]] for p in meta["validation"] if p["domain"] == domain]
            )
            windows = ids[: len(ids) // 512 * 512].view(-1, 512)
            windows = windows[torch.linspace(0, len(windows) - 1, 8).long()]
            result["held_out_perplexity"][domain] = perplexity(log_probabilities(model, windows), windows)
            result["routing"][domain] = routing(model, windows)
            mixed.append(windows[:2])
        result["routing"]["mixed"] = routing(model, torch.cat(mixed))
        print(json.dumps(result["held_out_perplexity"]), flush=True)
        print(
            json.dumps(
                {name: value["mean"] | value["lru_hit_rate"] for name, value in result["routing"].items()}, indent=1
            )
        )

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        (arguments.checkpoint / "chat_template.jinja").read_text()
    )
    for prompt, think in PROMPTS:
        text = template.render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, enable_thinking=think
        )
        began = time.time()
        written = write_greedily(model, tokenizer.encode(text, add_special_tokens=False).ids, 200, stop=(2, 11))
        answer = tokenizer.decode([t for t in written if t not in (2, 11)], skip_special_tokens=False)
        result["samples"].append(
            {
                "prompt": prompt,
                "think": think,
                "greedy": answer,
                "tokens": len(written),
                "ended": written[-1] in (2, 11),
            }
        )
        print(
            f"\n> {prompt}  [{len(written)} tokens, {len(written) / (time.time() - began):.0f} a second]\n{answer}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
