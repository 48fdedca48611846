"""Runs: what must be the same in two of them, step by step, and one cut back to a checkpoint of its middle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "target_tokens", "doc_ids_hash")


def figures(out: Path) -> list[dict]:
    """What of each step must be the same in every run: `SAME`, and the held-out loss, None where none was computed."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # Whole lines only: a run may be writing the last one.
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{key: step[key] for key in SAME} | {"eval_loss": step.get("eval_loss")} for step in steps]


def cut_back(run: Path, step: int, out: Path) -> None:
    """Make a run that has got as far as another one's checkpoint of that step, and can go on from it."""
    name = f"step{step}"
    (out / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / "checkpoints" / name, out / "checkpoints" / name)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:step]), encoding="utf-8")
    (out / "checkpoints" / "latest").write_text(name)
