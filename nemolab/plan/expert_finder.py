"""Where a model's routed experts are and what one of them is, found from the modules and what they do.

No family is known by name. Experts are many alike: parameters stacked [experts, rows, columns] in one module, such
stacks in modules side by side, matrices [experts x rows, columns] in one module, or a list of modules of one shape.
What makes them routed is that a router chooses some of them (`router_probe`); stacks nobody chooses from, such as
shared experts, are none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemolab.plan.router_probe import Routing, probe_block, probe_model

if TYPE_CHECKING:
    from torch import nn

# Holders of 3-D weights that are no stacks.
_NO_STACKS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "Embedding")


@dataclass(frozen=True)
class Candidate:
    """Many alike in one place.

    name      of the module that holds them
    block     of the module around them, which routes
    holders   the modules whose parameters they are
    experts   how many
    stacks    parameter name -> shape of one expert's share, (rows, columns) as stored, or (elements,) for a bias
    extra     parameters that hold more of the same than there are experts, by how many
    listed    a list of modules: its shapes are those of linear layers, rows first
    guessed   one matrix below the other: how many they are is taken from what may be a router beside them
    """

    name: str
    block: str
    holders: tuple[str, ...]
    experts: int
    stacks: dict[str, tuple[int, ...]]
    extra: int = 0
    listed: bool = False
    guessed: bool = False

    @property
    def layer(self) -> int | None:
        found = re.search(r"\.(\d+)\.", f".{self.name}.")
        return int(found[1]) if found else None


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of one block.

    matrices    (rows, columns) of each matrix of one expert, gate and up apart
    vectors     elements of one expert that are in no matrix: biases
    identities  choices that cost nothing: the router scores more experts than have weights
    phantoms    experts of which transformers holds a matrix though nothing ever uses it
    """

    candidate: Candidate
    top_k: int
    matrices: tuple[tuple[int, int], ...]
    vectors: int
    identities: int
    phantoms: int

    @property
    def experts(self) -> int:
        return self.candidate.experts

    @property
    def params(self) -> int:
        """Elements of one expert."""
        return sum(rows * columns for rows, columns in self.matrices) + self.vectors


def find_candidates(model: nn.Module) -> list[Candidate]:
    """Every place where many alike lie, in the model's order."""
    modules = dict(model.named_modules())
    found: list[Candidate] = []
    loners: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, module in modules.items():
        stacked = _stacked(module)
        if len(stacked) >= 2:
            found.append(_from_stacks(modules, name, _parent(name), (name,)))
        elif len(stacked) == 1:
            loners[_parent(name), next(iter(stacked.values()))[0]].append(name)
        elif (alike := _from_list(name, module) or _from_rows(modules, name)) is not None:
            found.append(alike)
    for (parent, _), names in loners.items():
        if len(names) >= 2:
            found.append(_from_stacks(modules, parent, parent, tuple(names)))
    return found


def find_experts(
    model: nn.Module, widths: tuple[int, ...], stated_top_k: int | None = None
) -> tuple[list[RoutedExperts], list[Candidate]]:
    """(routed experts by block, candidates nobody was seen to choose from).

    widths        of the hidden states to try
    stated_top_k  what the config says for itself, used where nothing was seen
    """
    modules = dict(model.named_modules())
    routed, unseen = [], []
    for candidate in find_candidates(model):
        routing = _probe(modules, candidate, widths)
        if routing is not None:
            routed.append(_describe(modules, candidate, routing))
        elif not candidate.guessed:
            unseen.append(candidate)
    if unseen and not routed:
        # No block ran by itself; a run of the whole model takes longer, so it comes last.
        places = {c.name: ([modules[name] for name in c.holders], c.experts) for c in unseen if not c.listed}
        seen = probe_model(model, places)
        for candidate in list(unseen):
            routing = seen.get(candidate.name)
            if routing is None and stated_top_k and not candidate.listed and stated_top_k <= candidate.experts:
                routing = Routing(stated_top_k, candidate.experts, None)
            if routing is not None:
                routed.append(_describe(modules, candidate, routing))
                unseen.remove(candidate)
    return routed, unseen


def _stacked(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """A module's own 3-D weights, if their first axis may count experts."""
    if type(module).__name__ in _NO_STACKS:
        return {}
    return {
        name: tuple(value.shape)
        for name, value in module.named_parameters(recurse=False)
        if value.dim() == 3 and value.shape[0] >= 2 and min(value.shape[1:]) >= 2
    }


def _from_stacks(modules: dict[str, nn.Module], name: str, block: str, holders: tuple[str, ...]) -> Candidate:
    firsts = [shape[0] for holder in holders for shape in _stacked(modules[holder]).values()]
    experts = min(firsts)
    stacks: dict[str, tuple[int, ...]] = {}
    for holder in holders:
        for key, value in modules[holder].named_parameters(recurse=False):
            if value.dim() >= 2 and value.shape[0] in (experts, max(firsts)):
                stacks[f"{holder}.{key}"] = tuple(value.shape[1:])
    return Candidate(name, block, holders, experts, stacks, max(firsts) - experts)


def _from_list(name: str, module: nn.Module) -> Candidate | None:
    """A ModuleList or ModuleDict within a layer, of at least two modules of one shape; empty ones cost nothing."""
    import torch

    if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
        return None
    if not re.search(r"\.\d+\.", f".{name}."):
        return None  # the list of layers itself
    children = list(module.named_children())
    shapes = [{key: tuple(value.shape) for key, value in child.named_parameters()} for _, child in children]
    weighty = [shape for shape in shapes if shape]
    if len(weighty) < 2 or any(shape != weighty[0] for shape in weighty):
        return None
    if sum(len(shape) == 2 for shape in weighty[0].values()) < 2:
        return None
    return Candidate(
        name, _parent(name), tuple(f"{name}.{key}" for key, _ in children), len(weighty), weighty[0], 0, True
    )


def _from_rows(modules: dict[str, nn.Module], name: str) -> Candidate | None:
    """A module in a layer with matrices of one shape, beside another that has a row for each share of their rows."""
    import torch

    if isinstance(modules[name], torch.nn.Linear | torch.nn.Embedding):
        return None
    own = {key: tuple(value.shape) for key, value in modules[name].named_parameters(recurse=False) if value.dim() == 2}
    if len(own) < 2 or len(set(own.values())) > 1:
        return None
    rows, columns = next(iter(own.values()))
    block = _parent(name)
    while re.search(r"\.\d+\.", f".{block}"):  # up to the layer, whose other parts are no routers of this one
        for child, module in modules[block].named_children():
            if f"{name}.".startswith(f"{block}.{child}."):
                continue
            counts = [value.shape[0] for value in module.parameters() if value.dim() == 2 and value.shape[1] == columns]
            if experts := next((count for count in counts if 2 <= count < rows and rows % count == 0), None):
                stacks = {f"{name}.{key}": (rows // experts, columns) for key in own}
                return Candidate(name, block, (name,), experts, stacks, guessed=True)
        block = _parent(block)
    return None


def _probe(modules: dict[str, nn.Module], candidate: Candidate, widths: tuple[int, ...]) -> Routing | None:
    block = modules[candidate.block]
    holders = [] if candidate.listed else [modules[name] for name in candidate.holders]
    return probe_block(block, holders, candidate.experts, widths, _routers(block, candidate))


def _routers(block: nn.Module, candidate: Candidate) -> Iterator[nn.Module]:
    """Modules beside the experts that know how many there are: they have a weight with one row for each."""
    for name, module in block.named_children():
        if f"{candidate.block}.{name}" in (candidate.name, *candidate.holders):
            continue
        if any(candidate.experts in value.shape for value in module.parameters() if value.dim() <= 2):
            yield module


def _describe(modules: dict[str, nn.Module], candidate: Candidate, routing: Routing) -> RoutedExperts:
    shapes = list(candidate.stacks.values())
    pairs = [shape for shape in shapes if len(shape) == 2]
    vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
    if not candidate.listed:
        pairs = _rows_first(pairs, getattr(modules[candidate.holders[0]], "is_transposed", None), routing.width)
        pairs = _gate_apart(pairs)
    identities = max(0, routing.scored - candidate.experts)
    return RoutedExperts(candidate, routing.top_k, tuple(pairs), vectors, identities, candidate.extra)


def _rows_first(pairs: list[tuple[int, ...]], transposed: object, width: int | None) -> list[tuple[int, int]]:
    """Stored [in, out] or [out, in], as [out, in]: the module may say, else the first reads what experts are given."""
    if not isinstance(transposed, bool):
        transposed = pairs[0][0] == width != pairs[0][1]
    return [(b, a) if transposed else (a, b) for a, b in pairs]


def _gate_apart(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """gate and up are kept in one stack of twice the rows; files and formats know them apart."""
    if len(pairs) == 2 and pairs[0][0] == 2 * pairs[1][1]:
        half = (pairs[0][0] // 2, pairs[0][1])
        return [half, half, pairs[1]]
    return pairs


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
