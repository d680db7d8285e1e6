"""What a model is to be recorded on: scripted conversations, or texts fed as if it had written them.

Everything is read and checked before anything runs; what is wrong is named by file and line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemolab.checkpoint.json_files import STRICT_JSON, RefusedJson
from nemolab.engine.chat import clean_messages
from nemolab.errors import EngineError

LIMIT_BYTES = 64 << 20
_FIELDS = ("messages", "name")
EXAMPLE = '[{"role": "user", "content": "What is TCP?"}]'


@dataclass(frozen=True)
class Script:
    """One conversation to hold.

    messages  cleaned; the model answers each user message that no assistant message follows, in turn
    where     file and line, for messages to people
    """

    name: str
    messages: list[dict]
    where: str

    @property
    def turns(self) -> list[int]:
        """How many messages stand before each answer that the model is to give."""
        roles = [message["role"] for message in self.messages] + ["user"]
        return [
            at for at in range(1, len(roles)) if roles[at - 1] in ("user", "tool") and roles[at] in ("user", "system")
        ]


@dataclass(frozen=True)
class Text:
    """One text to feed."""

    name: str
    text: str
    where: str


def read_prompts(path: str | Path) -> list[Script]:
    """Conversations from JSON lines: each a list of messages, or {"messages": [...], "name": "..."}. Blank lines pass.

    Raises EngineError naming file, line and what was expected.
    """
    path = Path(path)
    scripts = []
    # Not splitlines: JSON texts may hold other line ends, such as U+2028.
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            scripts.append(_read_script(line, f"{path}, line {number}", str(len(scripts))))
    if not scripts:
        raise EngineError(f"{path} is empty; one conversation a line was expected: {EXAMPLE}")
    return scripts


def read_texts(folder: str | Path) -> list[Text]:
    """The .txt files of a folder, by name. Raises EngineError where there is none, or one is empty or not UTF-8."""
    folder = Path(folder)
    if not folder.is_dir():
        raise EngineError(f"{folder} is no folder; one with .txt files was expected")
    texts = []
    for path in sorted(folder.glob("*.txt")):
        text = _read(path)
        if not text.strip():
            raise EngineError(f"{path} is empty; a text was expected")
        texts.append(Text(path.stem, text, str(path)))
    if not texts:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:3]) or "nothing"
        raise EngineError(f"{folder} holds no .txt file (it holds {found})")
    return texts


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise EngineError(f"{path} is not a regular file; a text was expected")
        if path.stat().st_size > LIMIT_BYTES:
            raise EngineError(f"{path} has {path.stat().st_size:,} bytes; at most {LIMIT_BYTES:,} are read")
        raw = path.read_bytes()
    except OSError as problem:
        raise EngineError(f"{path} cannot be read: {problem.strerror or problem}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise EngineError(f"{path}, line {line}: not UTF-8 at byte {problem.start}") from None


def _read_script(line: str, where: str, name: str) -> Script:
    try:
        found: Any = STRICT_JSON.decode(line)
    except RefusedJson as problem:
        raise EngineError(f"{where}: the line {problem}") from None
    except (ValueError, RecursionError) as problem:
        raise EngineError(f"{where}: not JSON ({problem}); a list of messages was expected: {EXAMPLE}") from None
    if isinstance(found, dict):
        unknown = sorted(set(found) - set(_FIELDS))
        if unknown or "messages" not in found:
            raise EngineError(f"{where}: fields {sorted(found)}; messages, and name if you like, were expected")
        name, found = found.get("name", name), found["messages"]
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise EngineError(f"{where}: name is {name!r}; a printable text was expected")
    if not isinstance(found, list):
        raise EngineError(f"{where}: {type(found).__name__} found; a list of messages was expected: {EXAMPLE}")
    try:
        script = Script(name, clean_messages(found), where)
    except EngineError as problem:
        raise EngineError(f"{where}: {problem}") from None
    if not script.turns:
        raise EngineError(f"{where}: no user message is left to answer; the last must be the user's (or a tool's)")
    return script
