"""Running a script on ranks of its own, on CPUs and without a network."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "launch" / "examples"


def output_of(script: Path, num_ranks: int, *arguments: str, folder: Path | None = None) -> str:
    """Run a script under torchrun in a folder, and give what it prints; AssertionError where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [*command, str(script), *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
