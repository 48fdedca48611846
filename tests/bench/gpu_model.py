"""The 135M model's training on one GPU, as train.py does it: tokens/s and model FLOPs utilisation from its metrics.

Random weights, the demo's corpus in packs, bf16 with ZeRO's float32 masters; medians over the steps after the first
ones. The peak that utilisation counts from is that of the GPU's data sheet in configs/cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from hsap import clusters
from hsap.steps import METRICS, read_steps
from tests.parity import REPOSITORY

PEAKS = {"H200": "hgx-h200", "H100": "dgx-h100", "A100": "dgx-a100", "B200": "dgx-b200"}
"""Cluster whose figures are those of a GPU with that in its name."""
FIRST_STEPS = 4
"""What is compiled, allocated and read on the way up isn't measured."""


def cluster_of(gpu: str) -> str | None:
    """The cluster of configs/cluster with GPUs of a name; None where there is none."""
    return next((cluster for part, cluster in PEAKS.items() if part in gpu), None)


def measure(device: str, gpu: str, pack_tokens: int, steps: int, *overrides: str) -> dict:
    """Train the model for some steps: figures, and the settings that they hold for. RuntimeError with what it said."""
    cluster = cluster_of(gpu)
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        settings = {
            "model": "smollm2-135m",
            "topology": "1x1",
            "engine": "bf16",
            "engine.device": device,
            "engine.zero_stage": 1,
            "data.pack_tokens": pack_tokens,
            "data.eval_path": "null",
            "train.packs_per_step": 1,
            "train.steps": FIRST_STEPS + steps,
            "train.save_every": 0,
            "train.tensorboard": "false",
            "out": folder,
        }
        if cluster is not None:
            settings["cluster"] = cluster
        given = [*(f"{key}={value}" for key, value in settings.items() if key != "out"), *overrides]
        command = [sys.executable, str(REPOSITORY / "train.py"), *given, f"out={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"bench gpu: training the 135M model failed: {done.stderr.strip()[-1500:]}")
        lines = [*read_steps(Path(folder) / METRICS)]
    counted = lines[FIRST_STEPS:]
    return {
        "method": "train.py",
        "settings": given,
        "device": gpu,
        "dtype": "bf16",
        "steps": len(counted),
        "tokens": median(line["tokens"] for line in counted),
        "step_s": median(line["step_s"] for line in counted),
        "tokens_per_s": median(line["tokens_per_s"] for line in counted),
        "mfu": median(line["mfu"] for line in counted) if cluster is not None else None,
        "peak_flops_per_s": clusters.read(cluster).flops_per_s if cluster is not None else None,
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines),
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
    }


def table(figures: dict) -> str:
    """One line of what was measured."""
    mfu = f"{figures['mfu']:.1%}" if figures["mfu"] is not None else "of a peak that isn't known"
    return (
        f"the 135M model on {figures['device']}, packs of {figures['tokens']:,.0f} tokens: "
        f"{figures['tokens_per_s']:,.0f} tokens/s, MFU {mfu}, {figures['step_s'] * 1e3:.0f} ms a step, peak memory "
        f"{figures['peak_memory_bytes'] / 2**30:.1f} GiB"
    )
