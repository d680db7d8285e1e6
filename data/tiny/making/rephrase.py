"""Vary the wording of own texts further: synonyms, linking words, changed order, and sentences from real manuals.

Templates alone make a model so sure of its next word that any other wording surprises it; these changes keep it unsure.
"""

import random
import re

SYNONYMS = """
send|transmit
sends|transmits
lost|dropped
arrive|come in|get there
arrives|comes in|gets there
quick|fast|rapid
small|little
large|big
because|since|as
computers|machines|hosts|devices
computer|machine|host|device
program|application|process
programs|applications|processes
begins|starts
needs|requires
waits|has to wait
answer|reply|response
answers|replies
again|once more|a second time
but|yet
notices|sees
complete|whole|entire
confirms|acknowledges
confirmation|acknowledgement
connection|link|session
message|datagram|packet
messages|datagrams|packets
keeps|holds
simple|plain|easy
useless|worthless|of no use
protocol|method
chosen|picked|selected
picks|chooses|selects
busy|full|loaded
отправляет|посылает|передаёт|шлёт
отправить|послать|передать
отправляют|посылают|передают
потерялся|пропал|исчез|не дошёл
потерянный|пропавший
потерянное|пропавшее
получатель|другая сторона|принимающая сторона
быстрее|скорее
поэтому|из-за этого|вот почему
потому что|так как|ведь
снова|опять|ещё раз|повторно
нужен|необходим|требуется
ждёт|ожидает
сначала|вначале|прежде всего
потом|затем|после этого
компьютер|узел|клиент
программе|приложению
замечает|видит|узнаёт
маленькая|небольшая|короткая
небольшая|маленькая|короткая
важна|нужна
читает|проверяет
находит|узнаёт
соединяет|связывает|объединяет
получает|принимает
"""
LINKS = (
    "In addition, ",
    "However, ",
    "For this reason, ",
    "As a result, ",
    "In practice, ",
    "Usually, ",
    "In most cases, ",
    "In other words, ",
    "Of course, ",
    "For example, ",
    "At the same time, ",
    "In short, ",
    "On the other hand, ",
    "This means that ",
)
LINKS_RU = (
    "Кроме того, ",
    "Однако ",
    "Поэтому ",
    "Обычно ",
    "На практике ",
    "Как правило, ",
    "Конечно, ",
    "Например, ",
    "При этом ",
    "Другими словами, ",
    "Чаще всего ",
    "Таким образом, ",
    "Это значит, что ",
)
FILLERS = ("usually ", "often ", "always ", "normally ", "then ", "simply ", "only ", "just ")
VERBS = re.compile(
    r"\b(sends|waits|keeps|needs|uses|reads|gets|gives|carries|opens|knows|says|shows|takes|puts|works)\b"
)
ARTICLE = re.compile(r"\b([Aa])n? (?!one\b|us|uni|hour)([a-z])")
TOPIC_WORDS = re.compile(
    r"network|packet|\bTCP\b|\bUDP\b|protocol|\bport\b|connection|router|server|client|address|browser|message|bytes|"
    r"сет[ьи]|пакет|протокол|порт|соединени|сервер|адрес|браузер|страниц|компьютер|файл|передач"
)
_GROUPS = {word: line.split("|") for line in SYNONYMS.strip().splitlines() for word in line.split("|")[:1]}
_WORD = re.compile(r"\b(" + "|".join(sorted(map(re.escape, _GROUPS), key=len, reverse=True)) + r")\b")


def rephrase(text: str, rng: random.Random, russian: bool) -> str:
    """Another wording of a paragraph: known words replaced, some links and fillers, perhaps another order."""
    text = _WORD.sub(lambda match: rng.choice(_GROUPS[match[0]]) if rng.random() < 0.4 else match[0], text)
    if not russian:
        text = VERBS.sub(lambda match: (rng.choice(FILLERS) if rng.random() < 0.06 else "") + match[0], text)
        text = ARTICLE.sub(lambda match: match[1] + ("n " if match[2] in "aeiou" else " ") + match[2], text)
    sentences = re.split(r"(?<=[.!?]) ", text)
    if len(sentences) > 2 and rng.random() < 0.2:
        tail = sentences[1:]
        rng.shuffle(tail)
        sentences[1:] = tail
    for i in range(1, len(sentences)):
        if rng.random() < 0.15:
            first, _, rest = sentences[i].partition(" ")
            if not (first.isupper() or re.search(r"[A-Z].*[A-Z]|^I$", first)):
                first = first[:1].lower() + first[1:]
            sentences[i] = rng.choice(LINKS_RU if russian else LINKS) + first + (" " + rest if rest else "")
    return " ".join(sentences)


def manual_sentences(documents: list[str]) -> list[str]:
    """Plain sentences of 40 to 220 characters about networks, files and servers, for mixing into own prose."""
    found = []
    for text in documents:
        for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text)):
            plain = re.fullmatch(r"[A-ZА-ЯЁ][\w ,;:()'’«»—–-]+[.!?]", sentence)
            if plain and 40 <= len(sentence) <= 220 and TOPIC_WORDS.search(sentence):
                found.append(sentence)
    return sorted(set(found))


def mix(text: str, sentences: list[str], rng: random.Random, share: float) -> str:
    """Put a manual's sentence behind some of the sentences of a text."""
    out = []
    for sentence in re.split(r"(?<=[.!?]) ", text):
        out.append(sentence)
        while rng.random() < share:
            out.append(rng.choice(sentences))
    return " ".join(out)
