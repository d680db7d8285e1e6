"""The small files beside the weights: byte-level tokenizer with the vendor's special ids, template, stop ids."""

from __future__ import annotations

import json
from pathlib import Path

RESERVED = 32
SPECIAL_TOKENS = {
    0: "<unk>", 1: "<s>", 2: "</s>", 10: "<|im_start|>", 11: "<|im_end|>", 12: "<think>", 13: "</think>",
    18: "<image>", 19: "<img>", 20: "</img>", 27: "<so_embedding>",
}  # fmt: skip
STOP_IDS = (2, 11)  # as releases have them
WHOLE_VOCAB = RESERVED + 256  # reserved ids, then one token a byte
# The bytes a smaller vocabulary keeps first; what is left out becomes <unk>.
_COMMON_BYTES = b" etaoinshrdlcumwfgypbvk.,\n" + b"ETAOINSHRDLCUMWFGYPBVKjxqzJXQZ0123456789'\"-:;!?()"

CHAT_TEMPLATE = """\
{%- set think = enable_thinking if enable_thinking is defined else true -%}
{%- if messages[0].role != "system" %}<|im_start|>system
<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}<think></think>{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% else %}<think></think>{% endif %}{% endif -%}
"""


def small_files(vocab: int, max_positions: int = 4096, stop_ids: tuple[int, ...] = STOP_IDS) -> dict[str, str]:
    """File name -> text. A vocabulary above 288 has ids no text makes, one below loses rare bytes to `<unk>`."""
    reserved = RESERVED if vocab >= WHOLE_VOCAB else max(1, min(RESERVED, vocab // 2))
    stops = [id for id in stop_ids if id < (reserved if stop_ids == STOP_IDS else vocab)] or [0]
    known = [SPECIAL_TOKENS.get(id, f"<SPECIAL_{id}>") for id in range(reserved)]
    word = lambda id: known[min(id, reserved - 1)]  # noqa: E731
    names = {"bos_token": word(1), "eos_token": word(stops[-1]), "pad_token": word(0), "unk_token": word(0)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_positions, **names}
    generation = {"bos_token_id": min(1, vocab - 1), "eos_token_id": stops, "pad_token_id": 0}
    generation |= {"do_sample": True, "temperature": 1.0, "top_p": 0.95}
    return {
        "tokenizer.json": _tokenizer(known, vocab - reserved),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "special_tokens_map.json": json.dumps(names, indent=1),
        "chat_template.jinja": CHAT_TEMPLATE,
        "generation_config.json": json.dumps(generation, indent=1),
    }


def write_small_files(folder: str | Path, vocab: int = WHOLE_VOCAB) -> None:
    """All of them into a folder."""
    for name, text in small_files(vocab).items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


def _tokenizer(special: list[str], room: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    if room < len(letters):
        shown = {byte: letter for letter, byte in _byte_of_letter(letters).items()}
        letters = [shown[byte] for byte in dict.fromkeys(_COMMON_BYTES + bytes(range(256)))][:room]
    vocab = {token: id for id, token in enumerate([*special, *sorted(letters)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str(pretty=True)


def _byte_of_letter(letters: list[str]) -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for 256, 257 ... in order."""
    others = iter(sorted(letter for letter in letters if ord(letter) > 255))
    return {chr(byte) if chr(byte) in letters else next(others): byte for byte in range(256)}
