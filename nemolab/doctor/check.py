"""One check's outcome, and how a check that breaks becomes one."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

STATUSES = ("ok", "info", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """What was looked at and what came out.

    status    "ok"; "info": a fact without a judgement; "warn": works, but not as it should; "fail": something that
              nemolab needs does not work
    found     in words
    expected  what would have been ok, where that can be said
    advice    what to do, in words
    """

    name: str
    status: str
    found: str
    expected: str = ""
    advice: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def attempt(name: str, look: Callable[..., Check | Iterable[Check]], *arguments) -> list[Check]:
    """Make one or several checks. Whatever goes wrong in there is itself a finding, not an end."""
    try:
        made = look(*arguments)
        return [made] if isinstance(made, Check) else list(made)
    except Exception as problem:
        words = " ".join(str(problem).split())[:200]
        found = f"this check could not be made ({type(problem).__name__}: {words})"
        return [Check(name, "warn", found, "", "what it looks at stays unknown; the other checks stand")]
