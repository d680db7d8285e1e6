"""Texts to compare on: files, strings or token ids, made into ids once and handed to both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemolab import paths
from nemolab.errors import NemolabError

if TYPE_CHECKING:
    from nemolab.checkpoint import Checkpoint

# Longer texts are cut here: the vocabularies of small tokenizers make thousands of tokens of a page.
MOST_TOKENS = 1024
MOST_BYTES = 64 << 20

Texts = Mapping[str, str | list[int]] | Iterable[str | Path] | str | Path | None


@dataclass(frozen=True)
class Text:
    """A text as ids. No BOS or other token is put in front.

    whole_tokens  tokens the text has; `ids` are the first MOST_TOKENS of them
    """

    name: str
    ids: list[int]
    whole_tokens: int

    @property
    def ids_sha256(self) -> str:
        """Of the ids as little-endian int32: the same here and there, or not the same text."""
        return hashlib.sha256(np.asarray(self.ids, "<i4").tobytes()).hexdigest()


class Tokens:
    """The checkpoint's own tokenizer.json, only to make ids of texts and to show single tokens."""

    def __init__(self, checkpoint: Checkpoint):
        from tokenizers import Tokenizer

        file = checkpoint.small_files().get("tokenizer.json")
        self.sha256, self._tokenizer, self._path = None, None, checkpoint.path
        if file is not None:
            raw = file.read_bytes()
            self.sha256 = hashlib.sha256(raw).hexdigest()
            try:
                self._tokenizer = Tokenizer.from_buffer(raw)
            except Exception as error:  # the library raises bare Exceptions
                raise NemolabError(f"{file} is no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise NemolabError(
                f"{self._path} has no tokenizer.json, so text cannot be made into tokens; give the texts as token ids"
            )
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def show(self, ids: list[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)


def load_texts(texts: Texts, tokens: Tokens, vocab_size: int, most_tokens: int = MOST_TOKENS) -> list[Text]:
    """Texts from a mapping (name -> text or ids), from files, from a folder of .txt files; None: `data/texts`.

    Raises NemolabError naming the text that is missing, unreadable, too short, or holds an id outside the vocabulary.
    """
    if texts is None:
        texts = paths.texts_folder()
    if isinstance(texts, Mapping):
        contents = dict(texts)
    else:
        contents = {file.stem: _read(file) for file in _list_files(texts)}
    if not contents:
        raise NemolabError(f"no texts to compare on: {texts} holds no .txt file")
    made = []
    for name, content in contents.items():
        ids = tokens.encode(content) if isinstance(content, str) else [int(token) for token in content]
        if len(ids) < 2:
            raise NemolabError(f"text {name!r} has {len(ids)} token(s); 2 or more are needed to score one")
        outside = next((token for token in ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise NemolabError(
                f"text {name!r} holds token {outside}, but the model's vocabulary has {vocab_size}:"
                " the tokenizer belongs to another checkpoint"
            )
        made.append(Text(name, ids[:most_tokens], len(ids)))
    return made


def _list_files(texts: Iterable[str | Path] | str | Path) -> list[Path]:
    if isinstance(texts, str | Path):
        path = Path(texts)
        return sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return [Path(file) for file in texts]


def _read(file: Path) -> str:
    try:
        if file.exists() and not file.is_file():  # a device or a pipe may never end
            raise NemolabError(f"{file} is not a regular file; a text was needed")
        if file.stat().st_size > MOST_BYTES:
            raise NemolabError(f"{file} has {file.stat().st_size:,} bytes; a text has at most {MOST_BYTES:,}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise NemolabError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise NemolabError(f"{file} is not UTF-8 at byte {error.start}") from error
