"""`python -m tests.gpu`: every test that needs a CUDA device, on the devices that are here; nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu.devices import HAS_CUDA

TESTS = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Pytest's exit code; 2 where there is no device, whose tests would otherwise all be skipped and look passed."""
    if not HAS_CUDA:
        print(
            "test gpu: torch sees no CUDA device here, so nothing was tested; run it on a machine with an NVIDIA GPU "
            "and a CUDA build of torch (`make test` runs the same tests on the CPU, as far as a CPU can).",
            file=sys.stderr,
        )
        return 2
    return int(pytest.main(["-m", "gpu", "-v", "--durations=8", str(TESTS), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
