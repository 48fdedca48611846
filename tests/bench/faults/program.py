"""train.py with a fault in one rank: the process that a launcher starts learns from its environment what shall happen.

The process that starts the ranks runs this too, and is left as it is.
"""

import json
import os
import signal
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def main() -> None:
    """Arm the fault where this is its rank, then do what train.py does."""
    sys.path[0] = str(REPOSITORY)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fault = json.loads(os.environ["HSAP_BENCH_FAULT"])
    if os.environ.get("RANK") == str(fault["rank"]):
        # DeepSpeed looks for accelerators when it is first imported.
        os.environ["DS_ACCELERATOR"] = "cpu"
        from tests.bench.faults.inject import Fault, arm

        arm(Fault(**fault))
    from hsap.train.launch import main as train

    train(REPOSITORY / "configs")


if __name__ == "__main__":
    main()
