"""Pretrain a language model on packed sequences: `deepspeed train.py +topology=4x2`; torchrun and python work as well.

The configuration lies in configs/; `python train.py --cfg job` prints it. hsap.train.launch puts it together and starts
or joins the ranks; hsap.train.run is the loop.
"""

from pathlib import Path

from hsap.train.launch import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent / "configs")
