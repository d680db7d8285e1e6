"""Where things are: the shipped data, the notebooks, the cache and the runs, from whatever folder one starts.

| variable      | what it moves                                                        |
|---------------|----------------------------------------------------------------------|
| NEMOLAB_HOME  | the folder that holds `data/` and `notebooks/` (a clone)              |
| NEMOLAB_MODEL | the checkpoint used where none is named                               |
| NEMOLAB_TRACE | the trace that notebooks look at where none is named                  |
| NEMOLAB_CACHE | where stores made on the way are kept (else `$XDG_CACHE_HOME/nemolab`) |
"""

import os
from pathlib import Path

from nemolab.errors import NemolabError, UsageError

MARKER = Path("data/tiny/config.json")  # the shipped checkpoint: a folder that holds it is a home


def expand(name: str | Path) -> Path:
    """A path with `~` and `~user` expanded. Raises UsageError for an empty name and for a user that is not there.

    An empty name comes from an unset shell variable; read as a path it would mean the current folder.
    """
    if not str(name):
        raise UsageError("an empty path; a file or folder was needed")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{str(name)!r}: the home folder it begins with cannot be found") from None


def home() -> Path:
    """The folder that holds `data/` and `notebooks/`.

    `NEMOLAB_HOME` decides where it is set; else the search goes upwards from the package's own file (a clone
    installed with `pip install -e`), then upwards from the current folder (a wheel used inside a clone).
    Raises NemolabError that names every place searched.
    """
    named = os.environ.get("NEMOLAB_HOME", "")
    if named:
        folder = expand(named).absolute()
        if not (folder / MARKER).is_file():
            raise NemolabError(
                f"NEMOLAB_HOME is {named!r}, which holds no {MARKER}; set it to a clone of nemolab or unset it"
            )
        return folder
    starts = [Path(__file__).resolve().parent, _current_folder()]
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / MARKER).is_file():
                return folder
    searched = " nor ".join(str(start) for start in starts)
    raise NemolabError(
        f"no {MARKER} at or above {searched}; start inside a clone of nemolab or set NEMOLAB_HOME to one"
    )


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # the folder we stand in was deleted
        return Path("/")


def data_folder() -> Path:
    """`data/`: the tiny checkpoint, evaluation texts, configs, claims and measurements."""
    return home() / "data"


def tiny_folder() -> Path:
    """`data/tiny`: the small trained checkpoint that ships, in the vendor's form."""
    return data_folder() / "tiny"


def texts_folder() -> Path:
    """`data/texts`: evaluation passages the tiny model has not seen."""
    return data_folder() / "texts"


def configs_folder() -> Path:
    """`data/configs`: the facts about published models that `nemolab plan` counts from."""
    return data_folder() / "configs"


def traces_folder() -> Path:
    """`data/traces`: recorded routing of the shipped model, and what it was asked."""
    return data_folder() / "traces"


def measurements_folder() -> Path:
    """`data/measurements`: one JSON line for each measured row."""
    return data_folder() / "measurements"


def notebooks_folder() -> Path:
    """`notebooks/`: numbered questions."""
    return home() / "notebooks"


def runs_folder() -> Path:
    """`runs/`: executed notebooks and their reports. Not created here."""
    return home() / "runs"


def cache_folder() -> Path:
    """Where stores made on the way are kept between calls. Not created here.

    Raises NemolabError where neither a variable says so nor the user has a home.
    """
    named = os.environ.get("NEMOLAB_CACHE", "")
    if named:
        return expand(named).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG rules say that a relative path is to be ignored
        user_home = _user_home()
        if user_home is None:
            raise NemolabError("this user has no home folder to keep stores in; set NEMOLAB_CACHE to a folder")
        base = user_home / ".cache"
    return base / "nemolab"


def _user_home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # HOME is not set and the user is in no list, as in some containers
        return None


def model_folder(path: str | Path | None = None) -> Path:
    """The checkpoint to use: the one named, else `NEMOLAB_MODEL`, else the shipped `data/tiny`."""
    named = str(path or "") or os.environ.get("NEMOLAB_MODEL", "")
    return expand(named) if named else tiny_folder()


def shown(path: str | Path) -> str:
    """A path as a reader wants it: from the home folder or from `~` where it lies below one, else in full."""
    full = Path(path).expanduser().absolute()
    for base, prefix in ((_home_or_none(), ""), (_user_home(), "~/")):
        if base is not None and full != base and full.is_relative_to(base):
            return prefix + str(full.relative_to(base))
    return str(full)


def _home_or_none() -> Path | None:
    try:
        return home()
    except NemolabError:
        return None
