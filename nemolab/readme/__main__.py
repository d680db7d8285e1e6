"""`python -P -m nemolab.readme`."""

import sys
from pathlib import Path

from nemolab import paths
from nemolab.readme import render


def main() -> int:
    """Rewrite README.md in place; says what was done."""
    path: Path = paths.home() / "README.md"
    before = path.read_text(encoding="utf-8")
    after = render(before)
    path.write_text(after, encoding="utf-8")
    print("README.md was up to date" if after == before else "README.md rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
