"""train.py on one GPU and on all: bf16, ZeRO 3, every setting that only a GPU has; on CPUs one rank without those."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.devices import HAS_CUDA, needs_gpu
from tests.parity import REPOSITORY, SMALL_MODEL, write_data

COUNT = torch.cuda.device_count() if HAS_CUDA else 0
RUNS = [
    pytest.param("cpu", 1, marks=pytest.mark.slow),
    pytest.param("cuda", 1, marks=needs_gpu),
    pytest.param(
        "cuda", COUNT, marks=[*needs_gpu, pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices or more")]
    ),
]
OF_GPUS = ("deterministic_backward=true", "profile.nvtx=true", "engine.comm_ctas=4", "engine=bf16")


@pytest.mark.parametrize(("device", "num_ranks"), RUNS)
def test_a_small_model_learns(device: str, num_ranks: int, tmp_path: Path) -> None:
    write_data(tmp_path)
    settings = {
        "data.path": tmp_path / "ragged.jsonl",
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.pack_tokens": 192,
        "train.steps": 6,
        "train.packs_per_step": 4,
        "train.tensorboard": "false",
        "train.save_every": 0,
        "engine.device": device,
        "optim.warmup_steps": 2,
        "topology": f"{num_ranks // 2}x2" if num_ranks % 2 == 0 else f"{num_ranks}x1",
        "out": tmp_path / "out",
        "profile.steps": "[3,5]",
        **SMALL_MODEL,
    }
    own = OF_GPUS if device == "cuda" else ()
    by_torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    command = [sys.executable, *(by_torchrun if num_ranks > 1 else ())]
    command += [str(REPOSITORY / "train.py"), *own, *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert abs(losses[0] - math.log(2048)) < 0.1 and losses[-1] < losses[0] - 0.02, losses
    timelines = [json.loads(line) for line in (tmp_path / "out" / "timeline-rank0.jsonl").read_text().splitlines()]
    assert {line["step"] for line in timelines} == {3, 4}
    assert all(end > start for line in timelines for start, end in [(line["start_s"][0], line["end_s"][-1])])
