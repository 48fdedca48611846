"""Loops: functions compiled to machine code by numba, and where that code is kept between processes.

numba keeps it by the source file of the function alone, but compiles what the function calls into it: after a change
there it would load what no longer is in the sources. So every room of the package (`compiler`, `planners`, ...) has a
place of its own for each state of its sources and of `ir`, whose constants its loops use. The first process that makes
a new place removes the room's old ones; what two processes compile at once is the same, and is put there in one piece.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.cpu import CPUTargetOptions
from numba.misc.appdirs import AppDirs

_PACKAGE = Path(__file__).resolve().parent
_DECORATING = threading.Lock()
_CAN_LEAVE_UNCOUNTED = hasattr(CPUTargetOptions, "_nrt")
"""The option is numba's own affair, and may be gone in another version."""


def loop(
    function: Callable[..., Any] | None = None, /, *, allocates: bool = True, **options: Any
) -> Callable[..., Any]:
    """Decorate a hot loop of a room of the package: compiled at its first call, once for each state of the sources.

    allocates: False promises that it makes no arrays, so that those it is given needn't be counted as used, which takes
    longer than many a loop; where numba has no such option they are counted. options: of `numba.njit`. A room may only
    call loops of its own. Where no place can be written to, every process compiles anew. Those are tried:
    `NUMBA_CACHE_DIR`, or `__pycache__` of the room and the user's cache folder.
    """
    if function is None:
        return functools.partial(loop, allocates=allocates, **options)
    if not allocates and _CAN_LEAVE_UNCOUNTED:
        options["_nrt"] = False
    options["no_cfunc_wrapper"] = True  # an entry from C is compiled too otherwise, and nobody calls it
    place = _place(_room(function))
    if place is None:
        return numba.njit(**options)(function)
    with _DECORATING:
        # numba takes the place from its settings when it decorates, and from nowhere else.
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(place)
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = before


def inner(function: Callable[..., Any] | None = None, /, **options: Any) -> Callable[..., Any]:
    """Decorate what only other loops call: without an entry from Python it compiles in two thirds of the time.

    options: of `loop`.
    """
    return loop(function, no_cpython_wrapper=True, **options)


def _room(function: Callable[..., Any]) -> Path:
    """Folder of the package in which a function is, however deep."""
    file = Path(function.__code__.co_filename).resolve()
    if _PACKAGE not in file.parents[1:]:
        raise ValueError(
            f"loop: {function.__qualname__} of {file} is in no folder below {_PACKAGE}; use numba.njit there"
        )
    return _PACKAGE / file.relative_to(_PACKAGE).parts[0]


@functools.cache
def _place(room: Path) -> Path | None:
    """Folder for the compiled loops of a room as its sources are now, made if need be; None where none can be."""
    sources = hashlib.sha256()
    for file in [Path(__file__), *sorted(room.rglob("*.py")), *sorted((_PACKAGE / "ir").rglob("*.py"))]:
        text = file.read_bytes()
        sources.update(f"{file.name} {len(text)} ".encode() + text)
    # Copies of the package may share a root; each removes only what is its own.
    mine = f"hsap-{room.name}-{hashlib.sha256(bytes(room)).hexdigest()[:8]}-"
    for root in _roots(room):
        place = root / (mine + sources.hexdigest()[:16])
        try:
            root.mkdir(parents=True, exist_ok=True)
            place.mkdir()
        except FileExistsError:
            pass
        except OSError:
            continue
        else:
            for old in root.glob(f"{mine}*"):
                if old != place:
                    shutil.rmtree(old, ignore_errors=True)
        if os.access(place, os.W_OK | os.X_OK):
            return place
    return None


def _roots(room: Path) -> Iterator[Path]:
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
    else:
        yield room / "__pycache__"
        yield Path(AppDirs("hsap", appauthor=False).user_cache_dir)


class _Notice(event.Listener):  # type: ignore[misc]  # numba has no types
    """Says at a terminal what takes so long, when a process compiles its first loop: once for each new place."""

    def __init__(self) -> None:
        self.due = True

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if not self.due or _PACKAGE not in Path(function.__code__.co_filename).resolve().parents:
            return
        self.due = False
        place = _place(_room(function))
        try:
            # Of processes that start together, one can make the file.
            (place / "noticed").touch(exist_ok=False) if place else None
        except OSError:
            return
        if sys.stderr.isatty():
            again = "once" if place else "in every process, as no cache folder can be written to (see NUMBA_CACHE_DIR)"
            print(f"hsap: compiling loops, {again}; takes up to a minute", file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        """Nothing to say."""


event.register("numba:compile", _Notice())
