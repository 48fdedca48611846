"""A rank that is stopped while NCCL's collectives wait for it: the watch ends all ranks, and tells which it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu.devices import HAS_CUDA
from tests.parity import REPOSITORY, SMALL_MODEL, write_data

COUNT = torch.cuda.device_count() if HAS_CUDA else 0


@pytest.mark.gpu
@pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices or more")
def test_a_stopped_rank_is_told_under_nccl(tmp_path: Path) -> None:
    write_data(tmp_path)
    settings = {
        "data.path": tmp_path / "ragged.jsonl",
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.pack_tokens": 192,
        "train.steps": 99_999,
        "train.packs_per_step": 4,
        "train.tensorboard": "false",
        "engine": "bf16",
        "engine.device": "cuda",
        "topology": f"{COUNT}x1",
        "guard.timeout_s": 10,
        "out": tmp_path / "out",
        **SMALL_MODEL,
    }
    command = [sys.executable, str(REPOSITORY / "train.py"), *(f"{key}={value}" for key, value in settings.items())]
    run = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    metrics, end = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    ranks = [child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == "1"]
    os.kill(ranks[0].pid, signal.SIGSTOP)
    _, told = run.communicate(timeout=120)
    assert run.returncode == 1
    assert re.search(rf"At fault: rank 1 \(pid {ranks[0].pid} on .*is stopped .*step \d+", told)
