"""Train the model on one GPU (or, for a check, a few steps on a CPU).

    python train.py TOKENS TARGET --seconds 170

Writes TARGET/trained.safetensors (fp32), shape.json and training_log.jsonl: a line for the settings, one each hundred
steps, one each evaluation. Hidden matrices learn by Muon, the rest by AdamW; the router is balanced by its correction
bias alone. The last fifth of the time sees the weights as they will be stored (NVFP4, FP8, BF16).
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer

from model import Shape, TinyNemotronH

MUON = {
    "in_proj",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "up_proj",
    "down_proj",
    "shared_up",
    "shared_down",
}
WARMUP_STEPS, COMPILE_STEPS = 100, 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrices, for a stack (n, rows, columns)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Muon:
    """Momentum, orthogonalised; matrices of equal shape (experts too) are stepped together."""

    def __init__(self, parameters: list[torch.nn.Parameter], rate: float, decay: float, momentum: float = 0.95):
        self.rate, self.decay, self.momentum, self.orthogonalise = rate, decay, momentum, orthogonalise
        self.groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(sorted(parameter.shape[-2:])), []).append(parameter)
        self.velocity = {id(parameter): torch.zeros_like(parameter) for parameter in parameters}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for (rows, columns), parameters in self.groups.items():
            gradients = [parameter.grad for parameter in parameters]
            velocity = [self.velocity[id(parameter)] for parameter in parameters]
            torch._foreach_lerp_(velocity, gradients, 1 - self.momentum)
            updates = torch._foreach_lerp(gradients, velocity, self.momentum)
            stack = torch.cat([(u if u.shape[-2] <= u.shape[-1] else u.mT).reshape(-1, rows, columns) for u in updates])
            stack = self.orthogonalise(stack)
            size, start = 0.2 * math.sqrt(columns) * self.rate * factor, 0
            for parameter in parameters:
                count = parameter.numel() // (rows * columns)
                update = stack[start : start + count]
                start += count
                if parameter.shape[-2] > parameter.shape[-1]:
                    update = update.mT
                parameter.mul_(1 - self.rate * factor * self.decay)
                parameter.add_(update.reshape(parameter.shape).to(parameter.dtype), alpha=-size)


class Windows:
    """Windows of the tokenised corpora, all on the device; drawn by weight, from a document's start or anywhere."""

    def __init__(self, folder: Path, device: str, length: int, seed: int):
        self.meta = json.loads((folder / "sources.json").read_text())
        read = lambda name, kind: torch.from_numpy(np.fromfile(folder / name, dtype=kind).astype(np.int64))  # noqa: E731
        self.train, self.validation = read("train.bin", np.uint16).int().to(device), read("val.bin", np.uint16)
        self.starts, self.device, self.length = read("starts.bin", np.int32).to(device), device, length
        sources = self.meta["sources"]
        column = lambda key: torch.tensor([source[key] for source in sources], device=device)  # noqa: E731
        self.weights, self.aligned, self.documents = column("weight").float(), column("aligned"), column("documents")
        self.first, self.first_document = column("start"), column("documents").cumsum(0) - column("documents")
        self.last = torch.maximum(self.first + column("length") - length - 1, self.first + 1)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.offsets = torch.arange(length + 1, device=device)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each (count, length)."""
        source = torch.multinomial(self.weights, count, replacement=True, generator=self.generator)
        u = torch.rand(3, count, device=self.device, generator=self.generator, dtype=torch.float64)
        anywhere = self.first[source] + (u[0] * (self.last[source] - self.first[source])).long()
        document = self.starts[self.first_document[source] + (u[1] * self.documents[source]).long()]
        start = torch.where(u[2] < self.aligned[source], torch.minimum(document, self.last[source]), anywhere)
        ids = self.train[start[:, None] + self.offsets].long()
        return ids[:, :-1], ids[:, 1:]

    def held_out(self, most: int) -> dict[str, torch.Tensor]:
        """Domain -> up to `most` windows (n, length + 1) spread over its held-out text."""
        windows: dict[str, list[torch.Tensor]] = {}
        for part in self.meta["validation"]:
            for start in range(part["start"], part["start"] + part["length"] - self.length - 1, self.length):
                windows.setdefault(part["domain"], []).append(self.validation[start : start + self.length + 1])
        return {
            domain: torch.stack([rows[i * len(rows) // min(most, len(rows))] for i in range(min(most, len(rows)))]).to(
                self.device
            )
            for domain, rows in windows.items()
        }


@torch.no_grad()
def mean_loss(model: TinyNemotronH, windows: torch.Tensor) -> float:
    """Cross-entropy a token in nats, nothing dropped."""
    total = 0.0
    for part in windows.split(16):
        logits, _ = model(part[:, :-1], capacity_factor=6.0, plain=True)
        total += F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].reshape(-1), reduction="sum").item()
    return total / windows[:, 1:].numel()


def split_parameters(model: TinyNemotronH) -> tuple[list, list, list]:
    """Parameters for Muon, for AdamW with decay, for AdamW without."""
    muon, decayed, plain = [], [model.embeddings, model.lm_head], [model.norm_f]
    for layer in model.layers:
        for name, parameter in layer.items():
            (muon if name in MUON else decayed if name == "gate" else plain).append(parameter)
    return muon, decayed, plain


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=170.0, help="training time after compilation")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after so many steps")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=4e-3, help="Muon's learning rate")
    parser.add_argument("--rate-adam", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay")
    parser.add_argument("--cooldown", type=float, default=0.7, help="last share of the time, with a falling rate")
    parser.add_argument("--quantised", type=float, default=0.2, help="last share of the time, with rounded weights")
    parser.add_argument("--balance", type=float, default=2e-4, help="step of the router's correction bias")
    parser.add_argument(
        "--sparsity", type=float, default=0.03, help="weight of the L1 term on the experts' activations"
    )
    parser.add_argument("--coherence", type=float, default=0.0, help="weight of the reward for staying with an expert")
    parser.add_argument("--evaluate-every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument(
        "--smoothing", type=float, default=0.1, help="label smoothing: keeps the model unsure of its templates"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="on the embeddings and before the head")
    parser.add_argument(
        "--texts", type=Path, help="evaluation texts; their loss is logged, nothing is learned from them"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device, on_gpu = arguments.device, arguments.device.startswith("cuda")
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    arguments.target.mkdir(parents=True, exist_ok=True)
    log = open(arguments.target / "training_log.jsonl", "w")

    def write(**values) -> None:
        log.write(
            json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}, default=str) + "\n"
        )
        log.flush()
        print(values, flush=True)

    data = Windows(arguments.tokens, device, arguments.length, arguments.seed)
    shape = Shape(vocabulary=data.meta["vocabulary"])
    model = TinyNemotronH(shape).to(device)
    muon_parameters, decayed, plain = split_parameters(model)
    muon = Muon(muon_parameters, arguments.rate, arguments.decay)
    groups = [{"params": decayed, "weight_decay": arguments.decay * 0.1}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=arguments.rate_adam, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu)
    if on_gpu:
        model.compile_blocks()
        muon.orthogonalise = torch.compile(orthogonalise, dynamic=False)
    write(
        kind="settings",
        parameters=sum(p.numel() for p in model.parameters()),
        train_tokens=len(data.train),
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name() if on_gpu else "none",
        **vars(arguments),
    )
    held_out = data.held_out(32 if on_gpu else 2)
    if arguments.texts:
        tokenizer = Tokenizer.from_file(str(arguments.tokens / "tokenizer.json"))
        for path in sorted(arguments.texts.glob("*.txt")):
            ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
            held_out[f"text_{path.stem}"] = torch.tensor([ids], device=device)

    def evaluate(**values) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            losses = {f"loss_{domain}": mean_loss(model, windows) for domain, windows in held_out.items()}
        write(kind="validation", **values, **losses)

    began = started = time.time()
    evaluated, seen, step, smoothed = 0.0, 0, 0, None
    while step < arguments.steps:
        if step <= COMPILE_STEPS:  # the clock starts when everything is compiled
            if on_gpu:
                torch.cuda.synchronize()
            started, seen = time.time(), 0
        elapsed = time.time() - started
        done = max(elapsed / arguments.seconds, step / arguments.steps)
        if done >= 1:
            break
        model.quantised = done > 1 - arguments.quantised or step in (2, 3)
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1 - done) / arguments.cooldown)
        inputs, targets = data.draw(arguments.batch)
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            logits, figures = model(inputs, dropout=arguments.dropout)
            entropy = F.cross_entropy(
                logits.float().flatten(0, 1), targets.reshape(-1), label_smoothing=arguments.smoothing
            )
            load, activation, overlap, dropped = (torch.stack(values) for values in zip(*figures, strict=True))
            loss = entropy + arguments.sparsity * activation.sum() - arguments.coherence * overlap.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*decayed, *plain], 1.0)
        for group in adam.param_groups:
            group["lr"] = arguments.rate_adam * factor
        adam.step()
        muon.step(factor)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            # experts with too few lookups get a larger bias, slower near the end
            pull = torch.sign(load.mean(1, keepdim=True) - load)
            model.bias += arguments.balance * pull * (1.0 if done < 0.7 else 0.3)
            model.bias -= model.bias.mean(1, keepdim=True)
            smoothed = entropy.detach() if smoothed is None else smoothed * 0.98 + 0.02 * entropy.detach()
        seen += inputs.numel()
        step += 1
        if step % (100 if on_gpu else 1) == 0:
            write(
                kind="step",
                step=step,
                seconds=elapsed,
                tokens=seen,
                loss=smoothed.item(),
                rate_factor=factor,
                largest_load=(load.amax(1) / load.mean(1)).mean().item(),
                dropped=dropped.mean().item(),
                activation=activation.mean().item(),
                overlap=overlap.mean().item(),
                quantised=model.quantised,
            )
        if on_gpu and step > 20 and elapsed - evaluated > arguments.evaluate_every:
            evaluated = elapsed
            evaluate(step=step, seconds=elapsed, tokens=seen, loss=smoothed.item(), quantised=model.quantised)
    for model.quantised in (False, True):
        evaluate(
            step=step,
            seconds=time.time() - started,
            tokens=seen,
            loss=smoothed.item(),
            quantised=model.quantised,
            final=True,
        )
    trained = {name: parameter.detach().cpu().contiguous() for name, parameter in model.state_dict().items()}
    save_file(trained, arguments.target / "trained.safetensors")
    (arguments.target / "shape.json").write_text(json.dumps(dataclasses.asdict(shape)))
    write(kind="end", seconds=time.time() - started, seconds_in_all=time.time() - began, tokens=seen)


if __name__ == "__main__":
    main()
