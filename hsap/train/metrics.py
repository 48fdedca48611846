"""Metrics: one JSON object a step in DIR/metrics.jsonl, the same figures for TensorBoard, and a progress line."""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from hsap.files import replace
from hsap.steps import METRICS, read_steps
from hsap.train.told import written


class MetricsLog:
    """Written by rank 0 only. Steps beyond `resumed_step` (a checkpoint's, 0 for a new run) are cut off first.

    ValueError where the disk is full, or the folder can't be written to.
    """

    def __init__(self, out: Path, num_steps: int, resumed_step: int, tensorboard: bool, log_every: int) -> None:
        self.path = out / METRICS
        with written(self.path):
            out.mkdir(parents=True, exist_ok=True)
            truncate(self.path, resumed_step)
            self.file = self.path.open("a", encoding="utf-8")
        # A log file gets a line now and then, a terminal its moving bar.
        often_s = 0.1 if sys.stderr.isatty() else 30.0
        self.bar = tqdm(
            total=num_steps, initial=resumed_step, unit="step", dynamic_ncols=True, mininterval=often_s, maxinterval=60
        )
        self.log_every = log_every
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, figures: dict) -> None:
        """Record a step. figures: JSON values by name, `step` among them; None for what is undefined."""
        with written(self.path):
            self.file.write(json.dumps(figures) + "\n")
            self.file.flush()
        step = figures["step"]
        if self.writer is not None:
            for name, value in figures.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.writer.add_scalar(name, value, step)
        if step % self.log_every == 0:
            shown = {"loss": figures["loss"], "tok/s": figures["tokens_per_s"], "eval": figures.get("eval_loss")}
            self.bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None}, refresh=False)
        self.bar.update(1)
        if "eval_loss" in figures:
            loss, eval_loss = ("-" if v is None else f"{v:.4f}" for v in (figures["loss"], figures["eval_loss"]))
            self.bar.write(f"step {step}: loss {loss}, eval loss {eval_loss}")

    def close(self) -> None:
        """Flush and close everything."""
        self.bar.close()
        # What `write` couldn't put on the disk, and has told, is tried again.
        with suppress(OSError):
            self.file.close()
        if self.writer is not None:
            self.writer.close()


def truncate(path: Path, last_step: int) -> None:
    """Keep the steps up to one, in one atomic replacement; lines that are no steps, as of a crash, go."""
    if not path.exists():
        return
    steps = (figures for figures in read_steps(path) if isinstance(figures.get("step"), int))
    kept = [json.dumps(figures) + "\n" for figures in steps if figures["step"] <= last_step]
    replace(path, "".join(kept).encode())


def ratio(value: float, count: float) -> float | None:
    """A ratio as a figure: None where it is undefined or not finite."""
    return value / count if count and math.isfinite(value) else None
