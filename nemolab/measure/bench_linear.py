"""Benchmarks of the dense products on a card, beside the read bandwidth and torch's BF16 products of the same run."""

from __future__ import annotations

import statistics
from typing import Any

from nemolab.errors import UsageError
from nemolab.measure.gpu_floors import BUFFER_BYTES, device_read_gb_s, need_card, time_graph

LEAST_BYTES = 64 * 10**6  # of a matrix: smaller ones can lie in a cache
RIVAL_SHAPE = (18560, 4096)  # in_proj of Super's Mamba layers, the widest matrix but the head
TOKENS = 2048
LAPTOP = {"gb_s": 448.0, "slots": 30 * 128 * 2.5e9, "card": 120}  # an 8 GB Blackwell: 30 multiprocessors, 2.5 GHz

# Instructions a lane issues for one weight: those of the kernel's loop over its weights, counted in its machine code
# for sm_90 and sm_120 at the sizes measured here. From sm_100 on a conversion of two codes replaces several of them.
INSTRUCTIONS = {
    "nvfp4": {90: 4.96, 120: 3.52},
    "fp8": {90: 3.88, 120: 3.69},
    "bf16": {90: 4.31, 120: 4.12},
}
BYTES = {"nvfp4": 9 / 16, "fp8": 1.0, "bf16": 2.0}


def bench_linear(tokens: int = TOKENS, repeats: int = 9) -> dict[str, Any]:
    """Matrix x vector in each stored format over several matrices in turn, and prompt products against torch's BF16.

    tokens   of the prompt
    returns  read_gb_s (a kernel that only sums, this run), <format>_us, <format>_gb_s and <format>_of_read (share of
             it) for one token; <format>_prompt_us, torch_prompt_us (float32 out), torch_bf16_prompt_us and
             <format>_of_torch (times the latter) for a prompt; bounds: what a weight takes at least on this card and on
             a laptop's (`weight_times`); rows
    Raises EngineError without a card, UsageError for no tokens.
    """
    import torch

    if tokens < 1:
        raise UsageError(f"{tokens} tokens; 1 or more are needed")
    need_card()
    rows_out: list[dict[str, Any]] = []
    read = device_read_gb_s(repeats)
    answer: dict[str, Any] = {"read_gb_s": statistics.median(read)}
    settings: dict[str, Any] = {"buffer_bytes": BUFFER_BYTES}
    rows_out.append({"name": "linear.read_bandwidth", "values": read, "unit": "GB/s", "settings": settings})
    for format in ("fp8", "nvfp4", "bf16"):
        matrices, settings = _matrices(format)
        nbytes = matrices[0].nbytes
        x = torch.randn(matrices[0].columns, device="cuda")
        y = torch.empty(matrices[0].rows, device="cuda")
        samples = time_graph(_products(matrices, x, y), repeats)
        seconds = statistics.median(samples)
        answer |= {
            f"{format}_us": 1e6 * seconds,
            f"{format}_gb_s": nbytes / seconds / 1e9,
            f"{format}_of_read": nbytes / seconds / 1e9 / answer["read_gb_s"],
        }
        settings |= {"bytes": nbytes, "matrices": len(matrices)}
        rows_out.append(
            {"name": f"linear.{format}", "values": [1e6 * s for s in samples], "unit": "us", "settings": settings}
        )
        shares = [nbytes / s / 1e9 / answer["read_gb_s"] for s in samples]
        rows_out.append({"name": f"linear.{format}_of_read", "values": shares, "unit": "ratio", "settings": settings})
        del matrices, y
    _bench_prompt(tokens, repeats, answer, rows_out)
    card = 120 if torch.cuda.get_device_capability() >= (10, 0) else 90
    here = {"gb_s": answer["read_gb_s"], "slots": issue_slots(), "card": card}
    answer["bounds"] = {
        format: {"here": weight_times(format, **here), "laptop": weight_times(format, **LAPTOP)} for format in BYTES
    }
    return answer | {"rows": rows_out}


def weight_times(format: str, gb_s: float, slots: float, card: int) -> dict[str, Any]:
    """What bounds a product: picoseconds a weight for its bytes, and for the instructions of its lane.

    gb_s   of the card's memory; slots: instructions of lanes it can issue in a second; card: 90, or 120 for newer ones
    Both are floors, and `bound` names the larger: they need not overlap, and instructions are counted as if any slot
    could issue any of them, though a card may have fewer units for some. Near one another, neither is reached.

    >>> weight_times("nvfp4", **LAPTOP)
    {'memory_ps': 1.26, 'instructions_ps': 0.37, 'bound': 'memory'}
    >>> weight_times("nvfp4", gb_s=4480, slots=132 * 128 * 1.98e9, card=90)
    {'memory_ps': 0.13, 'instructions_ps': 0.15, 'bound': 'instructions'}
    """
    memory, instructions = 1e3 * BYTES[format] / gb_s, 1e12 * INSTRUCTIONS[format][card] / slots
    bound = "memory" if memory >= instructions else "instructions"
    return {"memory_ps": round(memory, 2), "instructions_ps": round(instructions, 2), "bound": bound}


def issue_slots() -> float:
    """Instructions of single lanes that this card can issue in a second: four warps a multiprocessor and clock."""
    from triton.runtime import driver

    facts = driver.active.utils.get_device_properties(need_card().index)
    return facts["multiprocessor_count"] * 4 * 32 * facts["sm_clock_rate"] * 1e3


def matrix_shape(format: str) -> tuple[int, int]:
    """Rows and columns of the matrices measured in this format: LEAST_BYTES or more each."""
    rows, columns = RIVAL_SHAPE
    while rows * columns * BYTES[format] < LEAST_BYTES:
        rows *= 2
    return rows, columns


def _matrices(format: str) -> tuple[list, dict[str, Any]]:
    """Random matrices of one shape, together larger than a cache by far."""
    rows, columns = matrix_shape(format)
    nbytes = rows * columns * BYTES[format]
    count = max(4, round(600e6 / nbytes))
    return [random_matrix(format, rows, columns, seed) for seed in range(count)], {"rows": rows, "columns": columns}


def random_matrix(format: str, rows: int, columns: int, seed: int = 0):
    """A matrix on the card with random codes and scales near 1, as `nemolab.kernels.matvec.pack` describes it."""
    import torch

    from nemolab.kernels.matvec import pack

    generator = torch.Generator("cuda").manual_seed(seed)

    def codes(low: int, high: int, *shape: int):
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

    if format == "nvfp4":
        return pack("nvfp4", rows, columns, codes(0, 256, rows, columns // 2), codes(48, 72, rows, columns // 16), 1e-2)
    if format == "fp8":
        weight = codes(0, 2, rows, columns) * 128 + codes(0, 0x78, rows, columns)
        return pack("fp8", rows, columns, weight.view(torch.float8_e4m3fn), None, 1e-3)
    weight = torch.randn(rows, columns, device="cuda", generator=generator)
    return pack("bf16", rows, columns, weight.to(torch.bfloat16))


def _products(matrices, x, y) -> list:
    from nemolab.kernels.gpu.matvec import matvec

    return [lambda matrix=matrix: matvec(matrix, x, y) for matrix in matrices]


def _bench_prompt(tokens: int, repeats: int, answer: dict[str, Any], rows_out: list[dict[str, Any]]) -> None:
    import torch

    from nemolab.kernels.gpu.linear_prompt import linear_prompt

    rows, columns = RIVAL_SHAPE
    x = torch.randn(tokens, columns, device="cuda").to(torch.bfloat16)
    y = torch.empty(tokens, rows, device="cuda")
    settings = {"tokens": tokens, "rows": rows, "columns": columns, "output": "float32"}
    plain = [random_matrix("bf16", rows, columns, seed).keep[0] for seed in range(2)]
    samples = {"torch": time_graph([lambda w=w: torch.mm(x, w.T, out_dtype=torch.float32) for w in plain], repeats)}
    samples["torch_bf16"] = time_graph([lambda w=w: torch.mm(x, w.T) for w in plain], repeats)
    del plain
    for format in ("fp8", "nvfp4"):
        matrices = [random_matrix(format, rows, columns, seed) for seed in range(2)]
        samples[format] = time_graph([lambda m=m: linear_prompt(m, x, y) for m in matrices], repeats)
    torch_us = 1e6 * statistics.median(samples["torch_bf16"])
    answer |= {"tokens": tokens}
    for name, values in samples.items():
        answer[f"{name}_prompt_us"] = 1e6 * statistics.median(values)
        rows_out.append(
            {"name": f"linear.prompt_{name}", "values": [1e6 * s for s in values], "unit": "us", "settings": settings}
        )
    for format in ("fp8", "nvfp4"):
        answer[f"{format}_of_torch"] = answer[f"{format}_prompt_us"] / torch_us
