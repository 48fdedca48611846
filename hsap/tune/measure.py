"""Measure: short real trials of a table's best rows on this machine, by train.py in processes of its own.

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
from pathlib import Path

import numpy as np

from hsap.tune.experiment import chosen, overrides, spelled
from hsap.tune.job import Job
from hsap.tune.search import Row

STEPS = 4
LIMIT_S = 900


def measure(project: Path, job: Job, row: Row, extra: Sequence[str] = (), steps: int = STEPS) -> float | str:
    """Train a few steps at a row's setting: tokens/s of the middle step, the first left out; or why it failed.

    project: folder of train.py. extra: more overrides. All ranks run on this machine.
    """
    with tempfile.TemporaryDirectory() as out:
        keys = overrides(job, row) | {
            **chosen(job), "train.steps": steps, "train.eval_every": 0, "train.save_every": 0,
            "train.tensorboard": "false", "out": f"{out}/run",
            "data.path": f"{out}/documents.jsonl", "data.eval_path": None,
        }  # fmt: skip
        _write_documents(Path(out) / "documents.jsonl", job)
        given = [override(key, value) for key, value in keys.items()]
        python = [sys.executable]
        if row.setting.dp > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
                       f"--nproc-per-node={row.setting.world}"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"} if keys["engine.device"] == "cpu" else dict(os.environ)
        try:
            done = subprocess.run([*python, str(project / "train.py"), *given, *extra], cwd=out, env=environment,
                                  capture_output=True, text=True, timeout=LIMIT_S)  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took more than {LIMIT_S} s"
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
            return (said or done.stderr.strip().splitlines() or ["failed without a word"])[-1]
        lines = (Path(out) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rates = [json.loads(line)["tokens_per_s"] for line in lines]
        return statistics.median(rates[1:] or rates)


def override(key: str, value: object) -> str:
    """Spell a key for Hydra; a cluster's fields may be new to the group that is chosen."""
    return f"{'++' if key.startswith('cluster.') else ''}{key}={spelled(value)}"


def _write_documents(path: Path, job: Job) -> None:
    """Write a document of every length of the corpus, as token ids."""
    with path.open("w", encoding="utf-8") as file:
        for document, length in enumerate(job.lengths):
            ids = (np.arange(document, document + length) * 7919 % job.model.vocab_size).tolist()
            file.write(json.dumps({"id": str(document), "tokens": ids}) + "\n")
