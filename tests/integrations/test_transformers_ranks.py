"""Llama, Qwen2 and Mistral of transformers under DeepSpeed and FSDP2 on four ranks beside one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed here")
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_four_ranks_train_as_stock_models_do_in_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("transformers_rank.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [line for line in done.stdout.splitlines() if "loss off by" in line]
    assert len(told) == 16, done.stdout[-2000:]
