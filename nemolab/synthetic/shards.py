"""Which tensor lies in which file, and the headers: all of it known before a value is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nemolab.checkpoint.safetensors_header import HEADER_LIMIT_BYTES
from nemolab.checkpoint.shards import INDEX_FILE
from nemolab.errors import UsageError
from nemolab.synthetic.tensors import Tensor

LIKE_THE_VENDOR_BYTES = 5 * 10**9
LEAST_FILES = 3  # unless asked otherwise, so that every checkpoint has an index and experts cut in two


@dataclass(frozen=True)
class Shard:
    """One file: its tensors in order, its header as bytes (with the length in front), its size."""

    name: str
    tensors: Sequence[Tensor]
    header: bytes
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def split(tensors: list[Tensor], count: int | None, shard_bytes: int | None, index: bool | None) -> list[Shard]:
    """Files of about equal bytes; each boundary is moved to the nearest place between two tensors of one expert.

    count, shard_bytes  how many files, or about the most bytes of one; neither: the vendor's 5 GB
    index               False: one file named model.safetensors; None: so where one file is enough
    """
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    if count is None:
        count = -(-ends[-1] // (shard_bytes or LIKE_THE_VENDOR_BYTES))
        count = min(len(tensors), max(1 if shard_bytes else LEAST_FILES, count))
    if not 1 <= count <= len(tensors):
        raise UsageError(f"{count:,} shards cannot be made of {len(tensors):,} tensors; choose 1 to that many")
    places = [place for place in range(1, len(tensors)) if _cuts_an_expert(tensors, place)]
    if len(places) < count - 1:
        places = list(range(1, len(tensors)))
    cuts = _choose_cuts(places, ends, count)
    files = [tensors[start:stop] for start, stop in pairwise([0, *cuts, len(tensors)])]
    lone = count == 1 and not index
    return [
        _shard("model.safetensors" if lone else f"model-{number:05d}-of-{count:05d}.safetensors", members)
        for number, members in enumerate(files, 1)
    ]


def index_json(shards: list[Shard]) -> tuple[str, str] | None:
    """(file name, text) of the index, or None where one file needs none."""
    if shards[0].name == "model.safetensors":
        return None
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    total = sum(shard.data_bytes for shard in shards)
    return INDEX_FILE, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)


def _choose_cuts(places: list[int], ends: list[int], count: int) -> list[int]:
    """`count - 1` different places, each near its share of the bytes, in order."""
    cuts: list[int] = []
    at = 0  # index into places
    for number in range(1, count):
        target = ends[-1] * number / count
        last = len(places) - (count - 1 - number)  # leave one place for each cut that follows
        while at + 1 < last and abs(ends[places[at + 1] - 1] - target) <= abs(ends[places[at] - 1] - target):
            at += 1
        cuts.append(places[at])
        at += 1
    return cuts


def _shard(name: str, tensors: Sequence[Tensor]) -> Shard:
    listed: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        listed[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT_BYTES:
        raise UsageError(
            f"{name} would need a header of {len(text):,} bytes; readers take {HEADER_LIMIT_BYTES:,}: more shards"
        )
    return Shard(name, tensors, len(text).to_bytes(8, "little") + text, offset)


def _cuts_an_expert(tensors: list[Tensor], place: int) -> bool:
    before, after = tensors[place - 1].key, tensors[place].key
    if ".experts." not in before or ".experts." not in after:
        return False
    owners = [key.rpartition("_proj.")[0].rpartition(".")[0] for key in (before, after)]
    return owners[0] == owners[1]
