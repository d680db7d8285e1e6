"""A model of any family that transformers knows, built from its config alone on the meta device: shapes, no memory.

The config is a stranger's: no code of its is run (`auto_map` is dropped), its numbers are checked before anything is
built from them, and building stops at a bound of modules and of seconds.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemolab.errors import CheckpointError
from nemolab.plan.facts import HOW

if TYPE_CHECKING:
    from torch import nn

LARGEST_SIZE = 2**31 - 1
LONGEST_TEXT = 10**30  # tokenizers write 1e30 for a text without end; nothing is built from it
MOST_LAYERS = 1000  # the deepest published model has a few hundred
MOST_MODULES = 50_000  # the largest of transformers has 10,000; each takes about 100 us and 5 kB
MOST_SECONDS = 60.0
# Fields that count layers: a config class may make a list of that length before anybody builds a layer.
_COUNTS_LAYERS = re.compile(r"(^|_)(layers?|n_layer|depth|depths|blocks)$")
_IS_LENGTH = re.compile(r"max_|length|_len|window|chunk")
_LAYER_INDEX = re.compile(r"layers?_(start|end)|window|per_layer|start|end|every|interval|freq")
_LIST_LIMIT = 100_000
_DEPTH_LIMIT = 12
# How a model type is looked up: the first auto class that has it. A config with a text_config is multimodal first.
_AUTO_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "MODEL_MAPPING",
)  # fmt: skip
TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
# Ours, the quantisers' (that would want their packages), and what would run or fetch code.
_LEFT_OUT = (
    "nemolab",
    "quantization_config",
    "compression_config",
    "auto_map",
    "_name_or_path",
    "_attn_implementation",
)


@dataclass(frozen=True)
class BuiltModel:
    """`model` on the meta device, its `config` (transformers' object), and what had to be left aside to build it."""

    model: nn.Module
    config: Any
    notes: tuple[str, ...] = ()


def build_model(raw: dict[str, Any], where: str) -> BuiltModel:
    """Build the model of a parsed config.json without weights. Raises CheckpointError naming `where` and the cause."""
    check_sizes(raw, where)
    with _quiet():
        model_type, notes = _model_type(raw, where)
        try:
            config = _parse(raw, model_type, where)
            return BuiltModel(_build(config, where), config, notes)
        except CheckpointError as problem:
            key = next((key for key in TEXT_KEYS if isinstance(raw.get(key), dict) and "model_type" in raw[key]), None)
            if key is None:
                raise
            model_type, notes = _model_type(raw[key], f"{where}: {key}")
            text = _parse(raw[key], model_type, f"{where}: {key}")
            notes += (f"only {key} is counted: the whole could not be built ({problem})"[:400],)
            return BuiltModel(_build(text, f"{where}: {key}"), text, notes)


def check_sizes(raw: dict[str, Any], where: str) -> None:
    """Refuse numbers no honest config holds, naming the field: built from them, lists and models would not end."""
    for path, value in _leaves(raw, where):
        name = path.rpartition(".")[2]
        if isinstance(value, list):
            if len(value) > _LIST_LIMIT:
                raise CheckpointError(f"{where}: {path} has {len(value):,} entries; at most {_LIST_LIMIT:,} are read")
        elif isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{where}: {path} is NaN; a number was expected")
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif abs(value) > (LONGEST_TEXT if _IS_LENGTH.search(name) else LARGEST_SIZE):
            raise CheckpointError(
                f"{where}: {path} is {_short(value)}; a size of at most {LARGEST_SIZE:,} was expected"
            )
        elif abs(value) > MOST_LAYERS and _COUNTS_LAYERS.search(name) and not _LAYER_INDEX.search(name):
            raise CheckpointError(
                f"{where}: {path} is {_short(value)}; a count of layers of at most {MOST_LAYERS:,} was expected"
            )


def _leaves(value: Any, where: str, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _DEPTH_LIMIT:
        raise CheckpointError(f"{where}: {path[:80]} is nested more than {_DEPTH_LIMIT} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if depth or key not in ("quantization_config", "nemolab"):
                yield from _leaves(item, where, f"{path}.{key}" if path else str(key), depth + 1)
        return
    if isinstance(value, list):
        yield path, value
        for item in value[:_LIST_LIMIT]:
            yield from _leaves(item, where, path, depth + 1)
        return
    yield path, value


def _short(value: int) -> str:
    # Python refuses to print whole numbers of more than 4300 digits.
    return f"{value:,}" if abs(value) < 10**15 else f"a number of {int(value.bit_length() * 0.30103) + 1} digits"


def _model_type(raw: dict[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """(a model type transformers knows, notes): the config's own, or that of the class its `architectures` names."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, classes = raw.get("model_type"), raw.get("architectures")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return model_type, ()
    named = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None
    for mapping in _AUTO_MAPPINGS if named and (model_type is None or isinstance(model_type, str)) else ():
        for known, found in getattr(modeling_auto, f"{mapping}_NAMES", {}).items():
            if named in ((found,) if isinstance(found, str) else found) and known in CONFIG_MAPPING:
                unknown = (
                    f"model_type {model_type[:40]!r} is unknown to transformers"
                    if model_type
                    else "it has no model_type"
                )
                said = f"{unknown}, so it is counted as {known}"
                return known, (f"{said}: its architectures name {named[:60]}",)
    raise _unknown_type(model_type, list(CONFIG_MAPPING.keys()), where)


def _parse(raw: dict[str, Any], model_type: str, where: str) -> Any:
    """transformers' config object of a parsed config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {key: value for key, value in raw.items() if key not in _LEFT_OUT} | {"model_type": model_type}
    try:
        config = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # a stranger's numbers in a library's hands: any kind of error may come back
        raise CheckpointError(f"{where}: transformers cannot read it as {model_type}: {_one_line(error)}") from error
    _fill_token_ids(config)
    return config


def _unknown_type(model_type: object, known: list[str], where: str) -> CheckpointError:
    import transformers

    if model_type is None:
        return CheckpointError(f"{where} has no model_type; the name of a family was expected, such as mixtral")
    found = str(model_type)[:80]
    close = difflib.get_close_matches(found, known, n=3)
    like = f" (like {', '.join(close)})" if close else ""
    return CheckpointError(
        f"{where}: model_type {found!r} is unknown to transformers {transformers.__version__}{like}; install a newer"
        f" transformers, or {HOW}"
    )


def _fill_token_ids(config: Any) -> None:
    """Some models ask their config for token ids that few files name; no size depends on them."""
    for part in [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if part is not None and not hasattr(part, name):
                setattr(part, name, None)


def _build(config: Any, where: str) -> nn.Module:
    import torch

    model_class = _model_class(config, where)
    try:
        with torch.device("meta"), _budget(where):
            return model_class._from_config(config, dtype=torch.bfloat16).eval()
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{where}: its sizes ask for more memory than there is") from error
    except Exception as error:  # as above
        raise CheckpointError(
            f"{where}: transformers cannot build {model_class.__name__} from it: {_one_line(error)}"
        ) from error


def _model_class(config: Any, where: str) -> type:
    from transformers.models.auto import modeling_auto

    names = list(_AUTO_MAPPINGS)
    if any(hasattr(config, key) for key in TEXT_KEYS):
        names.append(names.pop(0))
    for name in names:
        mapping = getattr(modeling_auto, name, {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return _class_beside(config, where)


def _class_beside(config: Any, where: str) -> type:
    """The model class of a config that no auto class lists: the text half of a multimodal model, mostly."""
    import transformers
    from transformers import PreTrainedModel

    module_name = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        module = None
    classes = [
        found
        for name in dir(module)
        if isinstance(found := getattr(module, name), type)
        and issubclass(found, PreTrainedModel)
        and found.config_class is type(config)
        and not name.endswith("PreTrainedModel")
    ]
    if not classes:
        raise CheckpointError(
            f"{where}: transformers {transformers.__version__} knows the config {config.model_type!r}, but no model"
        )
    return max(classes, key=lambda found: ("ForCausalLM" in found.__name__, "For" in found.__name__))


@contextmanager
def _budget(where: str) -> Iterator[None]:
    """Stop building at MOST_MODULES or MOST_SECONDS: torch tells us of every module that joins another.

    A loop that makes no module is stopped by an alarm, where alarms can be had: in a program's main thread.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    deadline, built = time.monotonic() + MOST_SECONDS, 0

    def count(*_: object) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise CheckpointError(f"{where}: its sizes ask for more than {MOST_MODULES:,} modules; no real model does")
        if time.monotonic() > deadline:
            stop()

    def stop(*_: object) -> None:
        raise CheckpointError(f"{where}: building it took more than {MOST_SECONDS:.0f} s ({built:,} modules)")

    handle = register_module_module_registration_hook(count)
    in_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    before = signal.signal(signal.SIGALRM, stop) if in_main else None
    if in_main:
        signal.setitimer(signal.ITIMER_REAL, max(MOST_SECONDS, 0.001))
    try:
        yield
    finally:
        handle.remove()
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks libraries make about fields and kernels; nothing is asked of the network."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        stack.callback(logging.set_verbosity, before)
        yield


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300]
