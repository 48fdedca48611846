"""Pretrain a language model on packed sequences: `deepspeed train.py +topology=4x2`; torchrun and python work as well.

The configuration lies in configs/; `python train.py --cfg job` prints it. hsap.train.launch puts it together and starts
or joins the ranks; hsap.train.run is the loop.
"""

import os
import signal
from pathlib import Path


def end(number: int, frame: object) -> None:
    """End at an interrupt: until the loop runs, which notes it and saves, there is nothing to tidy up or to trace."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"train.py: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    # Before the imports, which take seconds. A rank that HSAP started ends even where it waits for others in C++; the
    # process that started it says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL if os.environ.get("HSAP_STARTED") == "1" else end)

    from hsap.train.launch import main

    main(Path(__file__).resolve().parent / "configs")
