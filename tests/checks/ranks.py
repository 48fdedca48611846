"""Ranks of a check, forked as tests/train/worlds.py forks them, of a package that may be broken on purpose."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tests.parity import Case, arguments
from tests.train.worlds import fork


def check(folder: Path, what: str, case: Case, broken: str = "") -> tuple[int, dict | str]:
    """Run a check on the ranks of a case; the exit code that all ranks had, and what was told: JSON where there is any.

    broken: what of the package, see `_break`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    overrides = arguments(case, folder / "ragged.jsonl", folder / "never")
    told = folder / f"told-{port}"
    task = ["--json", what, *overrides]
    ranks = [fork(_rank, rank, case.num_ranks, port, task, str(told), broken) for rank in range(case.num_ranks)]
    for rank in ranks:
        rank.join(300)
    codes = {rank.exitcode for rank in ranks}
    text = told.read_text()
    assert len(codes) == 1, f"{codes}: {text[-3000:]}"
    found = [line for line in text.splitlines() if line.startswith("{")]
    assert not (folder / "never").exists()
    return codes.pop(), json.loads(found[0]) if found else text


def _rank(rank: int, num_ranks: int, port: int, task: list[str], told: str, broken: str) -> None:
    handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    from hsap.checks.launch import rank_main

    _break(broken)
    rank_main(task)


def _break(what: str) -> None:
    if what == "scale":
        from hsap.train.engine import Engine

        Engine.num_averaged = property(lambda self: 1)
    elif what == "borders":
        from hsap.ir.layout import Layout
        from hsap.planning.compiling import PlanningSetup

        made = PlanningSetup.compile
        PlanningSetup.compile = lambda self, layout, answers=(): made(
            self, Layout.from_lengths([layout.num_tokens] if layout.num_tokens else []), ()
        )
