"""How numba compiles: ahead of use never, once per machine as a rule, and never a failure over a cache folder.

`jit` is numba's `njit` with the settings all compiled code shares:
- no fast-math: sums keep the order they are written in, so that bits depend neither on threads nor on the machine
- `nogil`: several threads run parts of one operator at the same time (`nemolab.kernels.team`)
- compiled code is kept in `__pycache__` beside its source or, where that cannot be written, in the user's cache
  folder; `NUMBA_CACHE_DIR` moves it. Where nothing can be written, code is compiled anew in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba
from numba.core import caching, types
from numba.extending import intrinsic, register_jitable


@cache
def _stamp_of_folder(folder: Path) -> str:
    """Changes whenever the source of any file in the folder, or of this one, does."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _KernelCache(caching.FunctionCache):
    """numba's cache on disk, keyed by the sources of the whole folder: compiled code calls within one folder only.

    numba looks at the file of the cached function alone, although the compiled code holds what that function calls
    from other files: after an edit there it would go on running the old code.
    """

    def __init__(self, function: Callable):
        super().__init__(function)
        stamp = _stamp_of_folder(Path(function.__code__.co_filename).parent)
        self._cache_file._source_stamp = (self._cache_file._source_stamp, stamp)

    def load_overload(self, signature, target_context):
        try:
            return super().load_overload(signature, target_context)
        except Exception:  # pickles of before an edit may name what is gone, a killed write leaves half: any error
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature, data) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason not to run what has just been compiled
            super().save_overload(signature, data)


SETTINGS = {"nogil": True, "error_model": "numpy"}
# For what only compiled code calls.
INNER = SETTINGS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}


def jit(function: Callable) -> Callable:
    """Compile `function` on its first call; see the module for the settings."""
    compiled = numba.njit(**SETTINGS)(function)
    with contextlib.suppress(RuntimeError, OSError):  # no folder can be written: compile in each process
        compiled._cache = _KernelCache(function)
    return compiled


def jit_inner(function: Callable) -> Callable:
    """For what only compiled code calls: no door from Python and no file of its own, so quicker to compile than `jit`.

    Called from Python the function runs as it is written: compiled without a door it would bring the process down.
    """
    return register_jitable(**INNER)(function)


@intrinsic
def unowned(typing_context, value):
    """The same arrays, or tuples of arrays, without a count of who refers to them; for compiled code only.

    numba counts at every call and every field of a tuple, in atomic steps, which adds up in small functions over a
    state of many arrays. Sound where the caller's arguments outlive the use, so never return one.
    """

    def make(context, builder, signature, arguments):
        return _forget_owner(context, builder, signature.args[0], arguments[0])

    return value(value), make


def _forget_owner(context, builder, kind, value):
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = context.get_constant_null(types.MemInfoPointer(kind.dtype))
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        items = [
            _forget_owner(context, builder, item, builder.extract_value(value, at)) for at, item in enumerate(kind)
        ]
        return context.make_tuple(builder, kind, items)
    return value


def is_cached(compiled: Callable) -> bool:
    """Whether compiled code of a kernel is in memory or on disk."""
    file = getattr(compiled._cache, "_cache_file", None)
    try:
        return bool(compiled.signatures) or (file is not None and bool(file._load_index()))
    except Exception:  # see load_overload
        return False
