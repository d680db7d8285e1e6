"""The small language in which the own texts are written, so that one line stands for many wordings.

`{a|b|c}` picks one alternative (nested if wanted, an empty one is allowed), `$name` inserts a bound word, and in
Russian `[он пошёл/она пошла]` picks by the gender of the bound person, `<он пошёл/она пошла>` by that of the animal.
"""

import random
import re
from dataclasses import dataclass, field

CHOICE = re.compile(r"\{([^{}]*)\}")
GENDERS = {"gender": re.compile(r"\[([^\[\]/]*)/([^\[\]/]*)\]"), "gender_2": re.compile(r"<([^<>/]*)/([^<>/]*)>")}
SENTENCE_START = re.compile(r"(?:^|(?<=[.!?] )|(?<=^[\"«])|(?<=[.!?:,] [\"«])|(?<=[.!?] — ))([a-zа-яё])")
NAME = re.compile(r"\$(\w+)")


def expand(template: str, rng: random.Random, **words: str) -> str:
    """Write one wording of a template.

    `words` are the bound names; `gender="f"` picks the second form in `[ / ]`, `gender_2="f"` the second in `< / >`.
    Raises KeyError for an unbound name.
    The first letter of every sentence is made a capital.
    """
    text = template
    while CHOICE.search(text):
        text = CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
    for key, pattern in GENDERS.items():
        form = 2 if words.get(key) == "f" else 1
        text = pattern.sub(lambda match, form=form: match[form], text)
    text = NAME.sub(lambda match: words[match[1]], text)
    text = re.sub(r" +", " ", text).replace(" ,", ",").replace(" .", ".").strip()
    return SENTENCE_START.sub(lambda match: match[1].upper(), text)


@dataclass(frozen=True)
class Topic:
    """A subject that can be asked about: questions, and an answer put together from groups of paraphrases.

    An answer takes the first group always and then a random subset of the others, in their order, so that the same
    question is answered in many ways. Each group is a list of templates that say the same thing.
    """

    questions: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    short: tuple[int, int] = (2, 4)
    title: str = ""
    words: dict[str, str] = field(default_factory=dict)

    def question(self, rng: random.Random) -> str:
        return expand(rng.choice(self.questions), rng, **self.words)

    def answer(self, rng: random.Random, most: int | None = None) -> str:
        """One answer of `short[0]` to `short[1]` sentences (or at most `most`)."""
        rest = list(range(1, len(self.groups)))
        wanted = rng.randint(self.short[0], max(self.short[0], min(most or self.short[1], len(self.groups))))
        chosen = [0, *sorted(rng.sample(rest, min(len(rest), wanted - 1)))]
        return " ".join(expand(rng.choice(self.groups[i]), rng, **self.words) for i in chosen)


def parse_topics(text: str) -> list[Topic]:
    """Read topics from their plain form: blocks parted by empty lines.

    A block holds `? question` lines, then sentences; a line `-` begins the next group of paraphrases, and an optional
    first line `# title min max` names the block and sets how many sentences an answer has.
    """
    topics = []
    for block in re.split(r"\n\s*\n", text.strip()):
        title, short, questions, groups = "", (2, 4), [], [[]]
        for line in (line.strip() for line in block.splitlines()):
            if line.startswith("# "):
                *words, least, most = line[2:].split()
                title, short = " ".join(words), (int(least), int(most))
            elif line.startswith("? "):
                questions.append(line[2:])
            elif line == "-":
                groups.append([])
            elif line:
                groups[-1].append(line)
        if not questions or not all(groups):
            raise ValueError(f"topic needs questions and no empty group: {block[:60]!r}")
        topics.append(Topic(tuple(questions), tuple(tuple(group) for group in groups), short, title))
    return topics
