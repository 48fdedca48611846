"""A training loop without training: writes metrics, says what it found, fails where planner options tell it to."""

import json
import os
import signal
from pathlib import Path

import torch.distributed as dist

from hsap.ir.problem import Topology
from hsap.train.config import TrainConfig


def check(config: TrainConfig) -> None:
    """Let everything pass: there is no data, and the model is a stand-in."""


def prepare_data(config: TrainConfig) -> None:
    """Prepare nothing."""


def run(config: TrainConfig, settings: str) -> None:
    dist.init_process_group("gloo")
    rank, options = dist.get_rank(), config.planner.options
    directories = [None] * config.world_size
    dist.all_gather_object(directories, config.out)
    if options.get("fault_rank", rank) == rank:
        match options.get("fault"):
            case "message":
                Topology.parse("the fault asked for")
            case "bug":
                raise RuntimeError("a bug in the loop")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
    if "fault" in options:
        dist.barrier()
    if rank == 0:
        out = Path(config.out)
        out.mkdir(parents=True)
        with (out / "metrics.jsonl").open("w") as file:
            for step in range(1, 4):
                row = {"step": step, "loss": 10.0 / step, "tokens_per_s": 100.0 * step}
                file.write(json.dumps({**row, "eval_loss": 4.5} if step == 2 else row) + "\n")
        found = {
            "world_size": dist.get_world_size(),
            "dp": config.dp,
            "device": config.engine.device,
            "planner": config.planner.name,
            "directories": sorted(set(directories)),
            "threads": os.environ.get("OMP_NUM_THREADS"),
        }
        print("FOUND " + json.dumps(found), flush=True)
    dist.destroy_process_group()
