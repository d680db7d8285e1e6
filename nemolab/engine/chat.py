"""Words to ids and back: tokenizer.json, the chat template, and what a conversation may look like.

Templates come from strangers and run in jinja2's immutable sandbox, with the settings and helpers transformers gives
them. A checkpoint may lack any of the files: without a template the package's own is used, which writes the form of
the Nemotron 3 models; without tokenizer.json only text is out of reach, ids still work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from nemolab.checkpoint.json_files import read_json
from nemolab.engine.text_stream import CLOSE, OPEN
from nemolab.errors import EngineError

TEMPLATE_LIMIT_BYTES = 2**20  # honest ones have some 10 KB
ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """tokenizer.json and the chat template of one checkpoint.

    find  small file name -> its path, or None where the checkpoint has none
    .notes  what was missing and what stands in for it
    """

    def __init__(self, find: Callable[[str], Path | None], where: str = "the checkpoint"):
        self._find, self._where = find, where
        self.notes: list[str] = []
        self._settings = self._json("tokenizer_config.json")
        self.template = self._read_template()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added, special tokens written out in the text become their ids."""
        _check_encodable(text, "the text")
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids without special tokens; think tags go too."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def decode_with_tags(self, ids: Iterable[int]) -> str:
        """As `decode`, but `<think>` and `</think>` stay, to be split from the answer."""
        hidden = self._hidden_ids
        return self._library.decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    def render(self, messages: list[dict], think: bool = False, tools: list[dict] | None = None) -> str:
        """The prompt for the assistant's next turn.

        messages  dicts with role (system, developer, user, assistant, tool) and content, a text or a list of text parts
        Raises EngineError for messages that are none and for what the template refuses.
        """
        import jinja2

        try:
            return self._template.render(
                messages=clean_messages(messages),
                tools=tools or None,
                add_generation_prompt=True,
                enable_thinking=think,
                **self._special_words,
            )
        except jinja2.TemplateError as problem:
            raise EngineError(f"the chat template of {self._where} refuses these messages: {problem}") from problem
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as problem:
            raise EngineError(
                f"the chat template of {self._where} fails: {type(problem).__name__}: {problem}"
            ) from problem

    @cached_property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _library(self):
        from tokenizers import Tokenizer as Library

        path = self._find("tokenizer.json")
        if path is None:
            raise EngineError(f"{self._where} has no tokenizer.json, and without one there is no text, only token ids")
        try:
            library = Library.from_file(str(path))
        except Exception as problem:  # the library raises bare Exception
            raise EngineError(f"{path} cannot be read as a tokenizer: {problem}") from None
        library.no_truncation()
        library.no_padding()
        return library

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        added = self._library.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special and token.content not in (OPEN, CLOSE))

    @cached_property
    def _special_words(self) -> dict[str, str]:
        """bos_token, eos_token ... as templates expect them."""
        words = {}
        for source in (self._json("special_tokens_map.json"), self._settings):
            for name, value in source.items():
                text = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(text, str):
                    words[name] = text
        return {"bos_token": "", "eos_token": "", **words}

    @cached_property
    def _template(self):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.template)
        except jinja2.TemplateError as problem:
            raise EngineError(f"the chat template of {self._where} is no valid template: {problem}") from problem

    def _read_template(self) -> str:
        path = self._find("chat_template.jinja")
        if path is not None:
            return _read_text(path)
        found = self._settings.get("chat_template") or self._json("chat_template.json").get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
        self.notes.append(f"{self._where} has no chat template; the package's own, of the Nemotron 3 form, is used")
        return resources.files("nemolab.engine").joinpath("default_template.jinja").read_text(encoding="utf-8")

    def _json(self, name: str) -> dict[str, Any]:
        path = self._find(name)
        return {} if path is None else read_json(path)


def _read_text(path: Path) -> str:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > TEMPLATE_LIMIT_BYTES:
            raise EngineError(f"{path} has {size_bytes:,} bytes; a template has at most {TEMPLATE_LIMIT_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise EngineError(f"{path} is not UTF-8 at byte {problem.start}") from None
    except OSError as problem:
        raise EngineError(f"{path} cannot be read: {problem.strerror or problem}") from None


def opens_thinking(prompt: str) -> bool:
    """True when a rendered prompt ends inside `<think>`: the answer then begins with reasoning."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


def clean_messages(messages: list[dict]) -> list[dict]:
    """Messages as templates take them: contents as one text, `developer` as `system`, an assistant's null as "".

    Raises EngineError naming the message and the field.
    """
    if not isinstance(messages, list) or not messages:
        raise EngineError("messages must be a list with at least one message")
    return [_clean_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _clean_message(message: object, where: str) -> dict:
    if not isinstance(message, dict):
        raise EngineError(f"{where} is {type(message).__name__}; an object with role and content is needed")
    role = message.get("role")
    if role not in ROLES:
        raise EngineError(f"{where}.role is {role!r}; known are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise EngineError(f"{where}.content is {type(content).__name__}; a text or a list of text parts is needed")
    _check_encodable(content, f"{where}.content")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _check_encodable(text: str, where: str) -> None:
    """Half a surrogate pair is no character: it stands for bytes that were no UTF-8, or for half of a JSON escape."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise EngineError(
            f"{where} is not Unicode text at character {problem.start}: {text[problem.start]!r}"
        ) from None


def _text_part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise EngineError(f"{where} is of type {kind!r}; only text parts are understood")


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own escapes for HTML, which would reach the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
