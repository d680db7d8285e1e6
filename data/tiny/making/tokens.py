"""Train the tokenizer, tokenise the corpora, and prove that the evaluation texts are not in them.

    python tokens.py WORK --texts TEXTS

Writes WORK/tokens: tokenizer.json, train.bin and val.bin (uint16), starts.bin (int32, where each training document
begins) and sources.json (ranges, weights, domains). Fails if any eight words in a row of an evaluation text occur in a
training document.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dialogues import read_documents
from heldout import is_held_out

VOCABULARY = 4096
END = 2  # </s>, after every document
TOKENIZER_SAMPLE_BYTES = 24e6
VALIDATION_TOKENS = 60_000
NGRAM_WORDS = 8
# ids as in the vendor's tokenizer: 2, 10-13 and 18-20 are what a chat needs
SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "<|im_start|> <|im_end|> <think> </think> <SPECIAL_14> <SPECIAL_15> <SPECIAL_16> <SPECIAL_17> <image> <img> </img>"
).split()
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# domain -> corpus -> share of the training windows (they are normalised)
WEIGHTS = {
    "own": {
        "own_network": 5,
        "own_network_ru": 5,
        "own_network_prose": 5,
        "own_network_prose_ru": 4,
        "own_words": 4,
        "own_words_ru": 3,
        "own_stories": 7,
        "own_stories_ru": 7,
        "own_problems": 4,
        "own_talk": 1.5,
        "own_tools": 1.5,
        "chat_words": 4,
        "chat_countries": 3,
        "chat_small_talk": 0.5,
        "chat_help": 3.5,
    },
    "literature": {"austen": 7, "moby": 2, "sotu": 9, "web_bible": 5, "factbook": 1},
    "technical": {
        "jargon": 1,
        "python_doc": 4,
        "neutron": 3.5,
        "openstack": 1.2,
        "django": 2,
        "postgres": 3,
        "sqlite": 2,
        "rust_books": 2,
        "apache": 1.2,
        "perl": 1.2,
        "handbook_en": 2,
        "gnome_en": 0.8,
        "libreoffice_en": 1.2,
    },
    "russian": {"libreoffice_ru": 4, "gnome_ru": 1.2, "handbook_ru": 2, "proverbs_ru": 0.6},
}
# these repeat the same facts in many wordings or hold pages that are held out elsewhere: no validation text from them
NOT_VALIDATED = {"chat_words", "chat_countries", "chat_small_talk", "chat_help"}


def train_tokenizer(documents: dict[str, list[str]], weights: dict[str, float]) -> Tokenizer:
    """Byte-level BPE over a sample of the corpora in proportion to their weights; digits stand alone."""
    rng = random.Random(3)
    total = sum(weights.values())

    def sample() -> Iterator[str]:
        for name, weight in weights.items():
            texts, wanted = documents[name][:], TOKENIZER_SAMPLE_BYTES * weight / total
            rng.shuffle(texts)
            for text in texts:
                for token in SPECIAL:
                    text = text.replace(token, " ")
                yield text
                wanted -= len(text.encode())
                if wanted <= 0:
                    break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        sample(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
            min_frequency=3,
        ),
    )
    return tokenizer


def ngrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)}


def overlaps(documents: dict[str, list[str]], texts: dict[str, str]) -> list[str]:
    """Every run of eight words that an evaluation text shares with a training document."""
    wanted = {gram: name for name, text in texts.items() for gram in ngrams(text)}
    found = []
    for corpus, corpus_texts in documents.items():
        for text in corpus_texts:
            found += [f"{wanted[gram]} / {corpus}: {' '.join(gram)}" for gram in ngrams(text) & wanted.keys()]
    return sorted(set(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="folder of the evaluation texts")
    arguments = parser.parse_args()
    weights = {name: weight for corpora in WEIGHTS.values() for name, weight in corpora.items()}
    domain_of = {name: domain for domain, corpora in WEIGHTS.items() for name in corpora}
    documents = {name: read_documents(arguments.work, name) for name in weights}
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(arguments.texts.glob("*.txt"))}
    shared = overlaps(documents, texts)
    if shared:
        raise SystemExit("evaluation text found in the training text:\n" + "\n".join(shared))
    print(f"no {NGRAM_WORDS} words in a row of {', '.join(texts)} occur in the training text", flush=True)

    target = arguments.work / "tokens"
    target.mkdir(exist_ok=True)
    tokenizer = train_tokenizer(documents, weights)
    tokenizer.save(str(target / "tokenizer.json"))

    train, starts, validation, sources, ranges = [], [], [], [], []
    train_length = 0
    rng = random.Random(4)
    for name, corpus_texts in documents.items():
        rng.shuffle(corpus_texts)
        encoded = [e.ids + [END] for e in tokenizer.encode_batch(corpus_texts, add_special_tokens=False)]
        held_out = [name not in NOT_VALIDATED and is_held_out(text) for text in corpus_texts]
        kept = [ids for ids, out in zip(encoded, held_out, strict=True) if not out]
        out = [token for ids, out in zip(encoded, held_out, strict=True) if out for token in ids][:VALIDATION_TOKENS]
        if out:
            ranges.append({"name": name, "domain": domain_of[name], "start": len(validation), "length": len(out)})
            validation += out
        lengths = np.array([len(ids) for ids in kept])
        starts.append((np.cumsum(lengths) - lengths + train_length).astype(np.int32))
        train.append(np.fromiter((token for ids in kept for token in ids), dtype=np.uint16))
        sources.append(
            {
                "name": name,
                "domain": domain_of[name],
                "weight": weights[name],
                "documents": len(kept),
                "start": train_length,
                "length": int(lengths.sum()),
                # chats are read from their beginning, long prose mostly from anywhere
                "aligned": 1.0 if domain_of[name] == "own" else 0.3,
            }
        )
        train_length += int(lengths.sum())
        size = sum(len(text.encode()) for text in corpus_texts)
        print(
            f"{name:16s} {lengths.sum() / 1e6:6.2f} M tokens {size / sum(map(len, encoded)):5.2f} bytes a token",
            flush=True,
        )
    np.concatenate(train).tofile(target / "train.bin")
    np.concatenate(starts).tofile(target / "starts.bin")
    np.array(validation, dtype=np.uint16).tofile(target / "val.bin")
    (target / "sources.json").write_text(
        json.dumps({"vocabulary": tokenizer.get_vocab_size(), "sources": sources, "validation": ranges}, indent=1)
        + "\n"
    )
    print(f"{train_length / 1e6:.2f} M training tokens, {len(validation) / 1e6:.2f} M held out")
    for name, text in texts.items():
        print(f"{name}: {len(tokenizer.encode(text, add_special_tokens=False).ids)} tokens")


if __name__ == "__main__":
    main()
