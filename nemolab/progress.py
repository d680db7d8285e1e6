"""What the person who waits is told, on stderr, so that stdout stays the answer: lines and bars."""

import sys
from collections.abc import Callable

Progress = Callable[[int, int], None]  # (done, total)


def say(line: str) -> None:
    """One line, at once."""
    print(line, file=sys.stderr, flush=True)


def progress_bar(label: str, unit: str) -> Progress:
    """A text bar that a long job feeds; silent where stderr is no terminal."""
    from tqdm import tqdm

    bar = tqdm(desc=label, unit=unit, unit_scale=True, disable=None, leave=False, dynamic_ncols=True, file=sys.stderr)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show
