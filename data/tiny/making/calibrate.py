"""Largest inputs of the quantised modules, for the checkpoint's `input_scale` (weight-only readers ignore them)."""

import torch
import torch.nn.functional as F

from model import PARAMETERS, Shape, attention_block, mamba_block, rms_norm, route
from quantise import ROUND, stored_format


@torch.no_grad()
def collect(trained: dict[str, torch.Tensor], ids: torch.Tensor, shape: Shape | None = None) -> dict[str, float]:
    """Run windows of ids (b,s) in fp32 through the stored weights; module name -> max |input|.

    An expert that no token chose gets its layer's largest input.
    """
    shape = shape or Shape()
    largest: dict[str, float] = {}

    def note(module: str, inputs: torch.Tensor) -> None:
        largest[module] = inputs.abs().max().item()

    x = F.embedding(ids, trained["embeddings"].float())
    moe_index = 0
    for layer, kind in enumerate(shape.pattern):
        weights = {
            name: ROUND[stored_format(layer, name, shape.pattern)](trained[f"layers.{layer}.{name}"])
            for name in PARAMETERS[kind]
        }
        y = rms_norm(x, weights["norm"])
        mixer = f"backbone.layers.{layer}."
        if kind == "M":
            note(mixer + "mixer.in_proj", y)
            # out_proj's input: the block with the identity in its place
            identity = {"out_proj": torch.eye(weights["out_proj"].shape[1], device=x.device)}
            note(mixer + "mixer.out_proj", mamba_block(x, *(weights | identity).values(), shape, residual=False))
            x = mamba_block(x, *weights.values(), shape)
        elif kind == "*":
            x = attention_block(x, *weights.values(), shape)
        else:
            flat = y.view(-1, shape.hidden)
            _, chosen, mix = route(flat, weights["gate"], trained["bias"][moe_index], shape)
            latent = F.linear(flat, weights["fc1_latent_proj"])
            out = torch.zeros_like(latent)
            for expert in range(shape.experts):
                tokens, rank = (chosen == expert).nonzero(as_tuple=True)
                rows = latent[tokens] if len(tokens) else latent
                active = F.relu(F.linear(rows, weights["up_proj"][expert])).square()
                note(f"{mixer}mixer.experts.{expert}.up_proj", rows)
                note(f"{mixer}mixer.experts.{expert}.down_proj", active)
                if len(tokens):
                    out.index_add_(0, tokens, F.linear(active, weights["down_proj"][expert]) * mix[tokens, rank, None])
            shared = F.relu(F.linear(flat, weights["shared_up"])).square()
            note(mixer + "mixer.shared_experts.up_proj", flat)
            note(mixer + "mixer.shared_experts.down_proj", shared)
            total = F.linear(out, weights["fc2_latent_proj"]) + F.linear(shared, weights["shared_down"])
            x = x + total.view_as(x)
            moe_index += 1
    return largest
