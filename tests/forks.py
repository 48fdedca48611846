"""Forks: processes of tests that begin with torch and what else takes seconds to load, from a server that has it."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
_loaded: list[str] = []


def preload(*modules: str) -> None:
    """Have the server load modules before it forks; it starts with the first process, whichever test asks for that."""
    _loaded.extend(module for module in modules if module not in _loaded)
    CONTEXT.set_forkserver_preload(_loaded)
