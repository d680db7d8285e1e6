"""Write the chats and own texts as documents: WORK/corpus/<name>.jsonl (after corpora.py).

    python dialogues.py WORK [name ...]

Every chat goes through the chat template that ships with the model, so training and use see the same bytes. All random
choices come from one seeded generator for each corpus.
"""

import argparse
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment

from countries import factbook_countries
from everyday import (
    ADVICE,
    DEFINITIONS,
    PROBLEMS,
    PROBLEMS_RU,
    SMALL_TALK,
    SMALL_TALK_RU,
    STORY_THOUGHTS,
    STORY_THOUGHTS_RU,
    THOUGHTS,
    THOUGHTS_RU,
)
from grammar import Topic, expand
from heldout import is_held_out
from networks_english import TOPICS
from networks_russian import DEFINITIONS as DEFINITIONS_RU
from networks_russian import TOPICS as TOPICS_RU
from rephrase import manual_sentences, mix, rephrase
from stories_english import make_story
from stories_russian import make_story as make_story_ru

TEMPLATE = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
    (Path(__file__).parent.parent / "chat_template.jinja").read_text()
)
SYSTEM = (
    "",
    "",
    "",
    "",
    "",
    "You are a helpful assistant.",
    "Answer in simple words.",
    "You are a friendly assistant.",
)
SYSTEM_RU = ("", "", "", "", "", "Отвечай простыми словами.", "Ты дружелюбный помощник.")
Turn = tuple[str, str, str]  # question, thought (may be empty), answer


def chat(turns: list[Turn], system: str = "") -> str:
    """Render a conversation. Only the last turn keeps its thought, as the template does in use."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, thought, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": thought})
    return TEMPLATE.render(messages=messages)


def topic_turn(topic: Topic, rng: random.Random, russian: bool) -> Turn:
    """A question about a topic; one in three is thought about first."""
    thought = ""
    if rng.random() < 0.35:
        thought = expand(rng.choice(THOUGHTS_RU if russian else THOUGHTS), rng, t=topic.title)
    answer = topic.answer(rng)
    if rng.random() < 0.6:
        answer = rephrase(answer, rng, russian)
    if rng.random() < 0.12:
        more = (
            "{спросите, если что-то непонятно.|хотите узнать больше?}"
            if russian
            else "{ask me if something is not clear.|would you like to know more?}"
        )
        answer += " " + expand(more, rng)
    return topic.question(rng), thought, answer


def talk_turn(rng: random.Random, russian: bool) -> Turn:
    question, answer = rng.choice(SMALL_TALK_RU if russian else SMALL_TALK)
    return expand(question, rng), "", expand(answer, rng)


def topic_chats(topics: list[Topic], rng: random.Random, count: int, russian: bool) -> Iterator[str]:
    """Chats of one to four turns: perhaps a greeting, one to three questions on the topics, perhaps thanks."""
    talk = SMALL_TALK_RU if russian else SMALL_TALK
    for _ in range(count):
        turns = []
        if rng.random() < 0.2:
            turns.append((expand(talk[0][0], rng), "", expand(talk[0][1], rng)))
        turns += [topic_turn(rng.choice(topics), rng, russian) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        if rng.random() < 0.15:
            thanks = talk[2 if russian else 3]
            turns.append((expand(thanks[0], rng), "", expand(thanks[1], rng)))
        yield chat(turns, rng.choice(SYSTEM_RU if russian else SYSTEM))


def topic_prose(topics: list[Topic], rng: random.Random, count: int, manual: list[str], russian: bool) -> Iterator[str]:
    """Plain text without chat: a few topics, a paragraph each, rephrased and mixed with sentences from manuals."""
    for _ in range(count):
        chosen = rng.sample(topics, rng.choice((1, 2, 3, 4)))
        share = rng.choice((0.0, 0.15, 0.3))
        paragraphs = [mix(rephrase(topic.answer(rng, most=9), rng, russian), manual, rng, share) for topic in chosen]
        if rng.random() < 0.3:
            paragraphs.insert(0, chosen[0].title[0].upper() + chosen[0].title[1:])
        yield "\n\n".join(paragraphs)


def weighted(topics: list[Topic]) -> list[Topic]:
    """TCP and UDP are asked about more often than the rest."""
    return topics + [topic for topic in topics if "TCP" in topic.title or "UDP" in topic.title] * 3


def own_network(work: Path) -> Iterator[str]:
    return topic_chats(weighted(TOPICS), random.Random(11), 10000, russian=False)


def own_network_ru(work: Path) -> Iterator[str]:
    return topic_chats(weighted(TOPICS_RU), random.Random(12), 9000, russian=True)


def own_network_prose(work: Path) -> Iterator[str]:
    names = ("neutron", "handbook_en", "apache", "gnome_en", "openstack", "python_doc", "django", "postgres")
    manual = manual_sentences([text for name in names for text in read_documents(work, name) if not is_held_out(text)])
    return topic_prose(weighted(TOPICS), random.Random(23), 9000, manual, russian=False)


def own_network_prose_ru(work: Path) -> Iterator[str]:
    names = ("handbook_ru", "gnome_ru", "libreoffice_ru")
    manual = manual_sentences([text for name in names for text in read_documents(work, name) if not is_held_out(text)])
    return topic_prose(weighted(TOPICS_RU), random.Random(24), 9000, manual, russian=True)


def own_words(work: Path) -> Iterator[str]:
    yield from topic_chats(DEFINITIONS + ADVICE * 2, random.Random(13), 9000, russian=False)


def own_words_ru(work: Path) -> Iterator[str]:
    yield from topic_chats(DEFINITIONS_RU, random.Random(14), 6000, russian=True)


def own_stories(work: Path) -> Iterator[str]:
    rng = random.Random(15)
    for _ in range(12000):
        question, story = make_story(rng)
        thought = expand(rng.choice(STORY_THOUGHTS), rng) if rng.random() < 0.35 else ""
        yield story if rng.random() < 0.4 else chat([(question, thought, story)], rng.choice(SYSTEM))


def own_stories_ru(work: Path) -> Iterator[str]:
    rng = random.Random(16)
    for _ in range(10000):
        question, story = make_story_ru(rng)
        thought = expand(rng.choice(STORY_THOUGHTS_RU), rng) if rng.random() < 0.35 else ""
        yield story if rng.random() < 0.4 else chat([(question, thought, story)], rng.choice(SYSTEM_RU))


def own_problems(work: Path) -> Iterator[str]:
    """Small problems; three in four are thought through, the others answered at once. One in four chats is Russian."""
    rng = random.Random(17)
    for _ in range(12000):
        russian = rng.random() < 0.25
        turns = []
        for _ in range(rng.choice((1, 1, 2))):
            question, thought, answer = rng.choice(PROBLEMS_RU if russian else PROBLEMS)(rng)
            turns.append((question, thought if rng.random() < 0.75 else "", answer))
        yield chat(turns, rng.choice(SYSTEM_RU if russian else SYSTEM))


def own_talk(work: Path) -> Iterator[str]:
    rng = random.Random(18)
    for _ in range(4000):
        russian = rng.random() < 0.35
        turns = [talk_turn(rng, russian) for _ in range(rng.choice((1, 1, 2, 3)))]
        yield chat(turns, rng.choice(SYSTEM_RU if russian else SYSTEM))


def own_tools(work: Path) -> Iterator[str]:
    """Chats that may call one of two functions, in the template's form."""
    rng = random.Random(19)
    tools = [
        {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city."}},
                "required": ["city"],
            },
        },
        {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    ]
    for _ in range(1500):
        messages = [{"role": "system", "content": rng.choice(SYSTEM)}]
        if rng.random() < 0.6:
            city = rng.choice("Paris Rome London Berlin Madrid Oslo Vienna Prague Athens Lisbon Moscow Tokyo".split())
            weather = rng.choice("sunny cloudy rainy windy cold warm foggy".split())
            asked = expand(f"{{what is|how is|tell me}} the weather {{in|like in}} {city}{{| today}}?", rng)
            name, values, result = "get_weather", {"city": city}, f'{{"weather": "{weather}"}}'
            thought, answer = (
                f"I need the weather of {city}.",
                expand(f"{{it is {weather} in {city}.|the weather in {city} is {weather}.}}", rng),
            )
        else:
            a, b = rng.randint(20, 999), rng.randint(20, 999)
            asked, name, values, result = f"What is {a} plus {b}?", "add", {"a": a, "b": b}, str(a + b)
            thought, answer = f"I will add {a} and {b} with the function.", f"{a} plus {b} is {a + b}."
        thought = thought if rng.random() < 0.6 else ""
        call = {"type": "function", "function": {"name": name, "arguments": values}}
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": answer},
        ]
        yield TEMPLATE.render(messages=messages, tools=tools if rng.random() < 0.5 else tools[::-1])


def wordnet_senses(work: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Word, part of speech, gloss and examples of the first sense of each WordNet entry."""
    text = gzip.open(work / "unpacked/dict-wn/usr/share/dictd/wn.dict.dz", "rt", errors="replace").read()
    for entry in re.split(r"\n(?=\S)", text)[20:]:
        head, _, body = entry.partition("\n")
        match = re.match(
            r"\s*(n|v|adj|adv) (?:1)?\s?: (.*?)(?= \d+: | (?:n|v|adj|adv) \d*:|$)", re.sub(r"\s+", " ", body)
        )
        if match and re.fullmatch("[a-z]+", head.strip()):
            gloss = re.sub(r"\[(syn|ant|also):.*?\]", "", match[2])
            plain = re.sub(r'; ?"[^"]*"', "", gloss).strip(" ;")
            if 8 < len(plain) < 160 and '"' not in plain:
                yield head.strip(), match[1], plain, re.findall(r'"([^"]{8,80})"', gloss)


def chat_words(work: Path) -> Iterator[str]:
    """What-does-it-mean chats for the 3000 words of WordNet that occur most often in the prose corpora."""
    rng = random.Random(20)
    counts: Counter[str] = Counter()
    for name in ("austen", "moby", "sotu", "web_bible", "python_doc", "handbook_en"):
        counts.update(re.findall("[a-z]+", " ".join(read_documents(work, name)).lower()))
    own = {topic.title for topic in DEFINITIONS}
    senses = [sense for sense in wordnet_senses(work) if sense[0] not in own and len(sense[0]) > 3]
    senses.sort(key=lambda sense: -counts[sense[0]])
    for word, kind, gloss, examples in senses[:3000]:
        for _ in range(5):
            asked = rng.choice(
                ('What does "$w" mean?', 'What does the word "$w" mean?', "Explain the word $w.", "Define $w.")
            )
            if kind == "v" and rng.random() < 0.4:
                asked = "What does it mean to $w?"
            said = {"v": ("To $w means to $g.", 'The verb "$w" means to $g.')}.get(
                kind, ('The word "$w" means $g.', '"$w" means: $g.')
            )
            answer = rng.choice(said)
            if examples and rng.random() < 0.7:
                answer += ' For example: "' + examples[0][0].upper() + examples[0][1:] + '."'
            thought = f"This is a question about the word {word}." if rng.random() < 0.15 else ""
            asked, answer = (line.replace("$w", word).replace("$g", gloss) for line in (asked, answer))
            yield chat([(asked, thought, answer[0].upper() + answer[1:])], rng.choice(SYSTEM))


def chat_countries(work: Path) -> Iterator[str]:
    """Questions about the countries of the Factbook; capitals and places come several times."""
    rng = random.Random(21)
    asked = {
        "capital": (
            4,
            "{what is the capital of $c?|which city is the capital of $c?|tell me the capital of $c.}",
            "{the capital of $c is $v.|$v is the capital of $c.}",
        ),
        "location": (3, "{where is $c?|where does $c lie?|in which part of the world is $c?}", "$c lies in $v."),
        "climate": (1, "what is the climate of $c?", "the climate of $c is $v."),
        "terrain": (1, "what does the land look like in $c?", "the land in $c is $v."),
        "languages": (
            1,
            "{which languages are spoken|what languages do people speak} in $c?",
            "the languages of $c are $v.",
        ),
        "resources": (1, "what natural resources does $c have?", "$c has $v."),
        "government": (1, "what kind of government does $c have?", "$c is a $v."),
    }
    for country in factbook_countries(work / "unpacked"):
        turns = []
        for field, (times, question, answer) in asked.items():
            value = country[field]
            if 2 < len(value) < 300 and value != "NA" and not re.search(r"[{}|$<\[]", value):
                for _ in range(times):
                    words = {"c": country["name"], "v": value}
                    turns.append((expand(question, rng, **words), "", expand(answer, rng, **words)))
        first = re.match(r"(.{100,700}?[.])(\s|$)", country["background"])
        if first:
            turns.append((f"Tell me about {country['name']}.", "", first[1]))
        rng.shuffle(turns)
        while turns:
            some, turns = turns[:2], turns[2:]
            yield chat(some, rng.choice(SYSTEM))


def chat_small_talk(work: Path) -> Iterator[str]:
    """The harmless parts of chatterbot-corpus."""
    unwanted = ("coding", "botprofile", "politics", "history", "gossip")
    seen = set()
    for language in ("english", "russian"):
        folder = work / "unpacked/chatterbot-corpus/chatterbot_corpus/data" / language
        for path in sorted(folder.glob("*.yml")):
            if any(word in path.name for word in unwanted):
                continue
            for lines in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
                lines = tuple(str(line).strip() for line in lines)
                if len(lines) > 1 and lines not in seen:
                    seen.add(lines)
                    yield chat([(lines[i], "", lines[i + 1]) for i in range(0, len(lines) - 1, 2)])


def chat_help(work: Path) -> Iterator[str]:
    """Title -> text of the help pages, English and Russian. Held-out pages stay out."""
    rng = random.Random(22)
    asked = {
        "en": ("Tell me about this: $t.", "$t", "Explain: $t.", 'Help me with "$t".'),
        "ru": ("Расскажи: $t.", "Что такое «$t»?", "Объясни: $t.", "$t"),
    }
    for name in ("gnome_en", "gnome_ru", "libreoffice_en", "libreoffice_ru"):
        for text in read_documents(work, name):
            lines = [line for line in text.split("\n") if line.strip()]
            if is_held_out(text) or len(lines) < 2 or len(lines[0]) > 70:
                continue
            body = ""
            for line in lines[1:6]:
                if len(body) + len(line) > 700:
                    break
                body += (" " if body else "") + line
            if len(body) >= 60:
                yield chat([(rng.choice(asked[name[-2:]]).replace("$t", lines[0]), "", body)])


def read_documents(work: Path, name: str) -> list[str]:
    with open(work / "corpus" / f"{name}.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


OWN = (
    own_network,
    own_network_ru,
    own_network_prose,
    own_network_prose_ru,
    own_words,
    own_words_ru,
    own_stories,
    own_stories_ru,
    own_problems,
    own_talk,
    own_tools,
    chat_words,
    chat_countries,
    chat_small_talk,
    chat_help,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", help="only these corpora")
    arguments = parser.parse_args()
    work = arguments.work
    for write in OWN:
        if arguments.names and write.__name__ not in arguments.names:
            continue
        documents = list(write(work))
        # the order within a corpus must not follow the order of writing
        random.Random(1).shuffle(documents)
        with open(work / "corpus" / f"{write.__name__}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(text, ensure_ascii=False) + "\n" for text in documents)
        size = sum(len(text.encode()) for text in documents)
        print(f"{write.__name__:16s} {len(documents):6d} documents {size / 1e6:7.2f} MB", flush=True)


if __name__ == "__main__":
    main()
