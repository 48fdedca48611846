"""Trials: short real runs of a table's best rows on this machine, by train.py in processes of its own.

They train on documents of the job's own lengths, whose tokens mean nothing, so that packs are those that were priced.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hsap.children import asks_to_end_with_us, ended_on_sigterm
from hsap.ir.check import Refused
from hsap.steps import METRICS, read_steps
from hsap.tune.experiment import chosen, overrides, spelled
from hsap.tune.found import Row
from hsap.tune.job import Job

STEPS = 4
LIMIT_S = 900.0
ENDING_S = 60.0
"""How long a trial that is ended may take to end its ranks, for which torch's agent takes half of it at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a trial: tokens_per_s of the whole job, or None, and in words why it failed."""

    tokens_per_s: float | None
    failed: str | None = None


def check_measurable(job: Job) -> None:
    """Refuse, by ValueError, a job that one machine doesn't run."""
    if job.num_nodes > 1:
        raise Refused(f"trials run on this machine alone, and the job is for {job.num_nodes} nodes; ask for one node")


def measure(
    project: Path, job: Job, row: Row, extra: Sequence[str] = (), steps: int = STEPS, limit_s: float = LIMIT_S
) -> Measured:
    """Train a few steps at a row's setting: the middle step's tokens/s, the first left out; or why it failed.

    project: folder of train.py. extra: more overrides. All ranks run on this machine, and are gone when this returns or
    raises, as is all that they wrote.
    """
    with tempfile.TemporaryDirectory(prefix="hsap-trial-") as out:
        keys = overrides(job, row) | {
            **chosen(job), "engine.device": "cpu" if job.cluster.is_host else "cuda",
            "train.steps": steps, "train.eval_every": 0, "train.save_every": 0, "train.tensorboard": "false",
            "out": f"{out}/run", "data.path": f"{out}/documents.jsonl", "data.eval_path": None,
        }  # fmt: skip
        _write_documents(Path(out) / "documents.jsonl", job)
        given = [override(key, value) for key, value in keys.items()]
        python = [sys.executable]
        if row.setting.dp > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
                       f"--nproc-per-node={row.setting.world}"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"} if job.cluster.is_host else dict(os.environ)
        code = _run([*python, str(project / "train.py"), *given, *extra], Path(out), environment, limit_s)
        if code is None:
            return Measured(None, f"took more than {limit_s:g} s")
        if code:
            return Measured(None, _complaint((Path(out) / "said").read_text(encoding="utf-8", errors="replace")))
        rates = [step["tokens_per_s"] for step in read_steps(Path(out) / "run" / METRICS)]
        if not rates:
            return Measured(None, "it wrote no metrics where it was told to; leave out the override that moves them")
        return Measured(statistics.median(rates[1:] or rates))


def _run(command: Sequence[str], folder: Path, environment: dict[str, str], limit_s: float) -> int | None:
    """Run a command in a folder: its exit code, None where it took too long. What it said is in the file `said`."""
    # Into a file, not a pipe: whoever else holds a pipe's end keeps its reader waiting.
    with (folder / "said").open("wb") as said, ended_on_sigterm():
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
            preexec_fn=asks_to_end_with_us(),
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Asked, torch's agent ends its ranks, which are in sessions of their own; killed, it leaves them behind.
            process.terminate()
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _complaint(said: str) -> str:
    """The paragraph in which train.py says what is wrong, else the last line of what a failed trial said."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("train.py: ")]
    return (told or lines or ["it failed without a word"])[-1].strip()


def override(key: str, value: object) -> str:
    """Spell a key for Hydra; a cluster's fields may be new to the group that is chosen."""
    return f"{'++' if key.startswith('cluster.') else ''}{key}={spelled(value)}"


def _write_documents(path: Path, job: Job) -> None:
    """Write a document of every length of the corpus, as token ids."""
    with path.open("w", encoding="utf-8") as file:
        for document, length in enumerate(job.lengths):
            ids = (np.arange(document, document + length) * 7919 % job.model.vocab_size).tolist()
            file.write(json.dumps({"id": str(document), "tokens": ids}) + "\n")
