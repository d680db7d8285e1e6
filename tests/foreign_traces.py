"""Small valid routing traces in the forms of others, made from arrays, for tests to read and to spoil."""

import io
import json
import zipfile

import numpy as np

SIZES = (3000, 2000, 3000)  # bytes of an expert by layer


def draw_routing(tokens=7, layers=3, n_experts=8, top_k=2, seed=0):
    """experts (tokens, layers, top_k) in no order of number, weights that fall and are exact in six digits."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((tokens, layers, n_experts)), axis=2)[:, :, :top_k].astype(np.int16)
    weights = -np.sort(-rng.integers(1, 10**6, (tokens, layers, top_k)), axis=2) / 10**6
    return experts, weights.astype(np.float32)


def route_csv(experts, weights, turns=((4, 3),), *, sizes=SIZES, n_experts=8, short=True, dropped=False, first_step=0):
    """turns: (tokens of the prompt, tokens of the answer) each; short: of a prompt the last layer has its end alone."""
    n_layers, top_k = experts.shape[1:]
    lines = [
        "# route_trace v1",
        f"# model=/some where/Tiny-MoE.gguf arch=tiny n_layer={n_layers} n_expert={n_experts} n_expert_used={top_k}",
        *(f"# layer={layer} expert_bytes={size} dense_bytes=77" for layer, size in enumerate(sizes)),
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes" + (",dropped" if dropped else ""),
    ]
    token, step = 0, first_step
    for turn, (prompt, answer) in enumerate(turns):
        batches = [(0, range(prompt))] + [(1, [prompt + number]) for number in range(answer)]
        for phase, numbers in batches:
            for layer in range(n_layers):
                kept = numbers if phase or not short or layer < n_layers - 1 else numbers[-1:]
                seen = set()
                for number in kept:
                    for slot in range(top_k):
                        expert = experts[token + number, layer, slot]
                        read = 0 if expert in seen or slot else sizes[layer]  # rank 0 is always read, the others hit
                        seen.add(expert)
                        left_out = f",{int(slot == 1)}" if dropped else ""
                        weight = f"{weights[token + number, layer, slot]:.6g}"
                        place = f"{turn},{phase},{step + number},{layer},{slot}"
                        lines.append(f"{place},{expert},{weight},{int(not read)},{read}{left_out}")
        token += prompt + answer
        step = 0
    return "\n".join(lines) + "\n"


def token_lines(experts, first=0):
    return "".join(
        json.dumps({"tok": first + token, "layers": ids.tolist()}) + "\n" for token, ids in enumerate(experts)
    )


def layer_lines(experts, weights=None, *, by_layer=False, layers=None, first=0):
    layers = range(experts.shape[1]) if layers is None else layers
    records = []
    for token, ids in enumerate(experts):
        for place, layer in enumerate(layers):
            record = {"layer_idx": layer, "token_idx": first + token, "selected_ids": ids[place].tolist()}
            if weights is not None:
                record["gate_weights"] = [round(float(weight), 6) for weight in weights[token, place]]
            records.append(record)
    if by_layer:
        records.sort(key=lambda record: record["layer_idx"])
    return "".join(json.dumps(record) + "\n" for record in records)


def routed_npz(experts, *, compressed=True, **others):
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, routed_experts=experts, **others)
    return file.getvalue()


def zip_of(name, data, *, compression=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def npy(header, data=b"", version=1):
    """A NumPy array's bytes under any header; a dict is written as NumPy does."""
    text = repr(header) if isinstance(header, dict) else header
    raw = text.encode("latin-1") + b"\n"
    length = len(raw).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + raw + data
