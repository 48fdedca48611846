"""Checkpoints: DeepSpeed's own files in DIR/checkpoints/stepN, and the place in the data beside them as JSON.

A checkpoint counts once `latest` names it, and that is written last, in one atomic replacement.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from hsap.train.config import TrainConfig
from hsap.train.engine import Engine

_FIXED = ("data.path", "data.tokenizer", "data.pack_tokens", "data.packing", "train.seed", "train.packs_per_step")
"""Settings that a resumed run can't change: they decide which tokens come in which step."""


def save(engine: Engine, config: TrainConfig, step: int, cursor: dict) -> None:
    """Save after `step`, then drop all but the newest `train.keep`. Collective over the job."""
    folder = Path(config.out) / "checkpoints"
    tag = f"step{step}"
    engine.deepspeed.save_checkpoint(str(folder), tag=tag, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        state = {"step": step, "cursor": cursor, "topology": config.topology, "planner": config.planner.name}
        state["settings"] = {name: _setting(config, name) for name in _FIXED}
        (folder / tag / "hsap.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        fresh = folder / "latest.tmp"
        fresh.write_text(tag, encoding="utf-8")
        os.replace(fresh, folder / "latest")
        for old in sorted(_steps(folder))[: -config.train.keep]:
            shutil.rmtree(folder / f"step{old}", ignore_errors=True)
    dist.barrier()


def load(engine: Engine, config: TrainConfig) -> dict:
    """Load the newest checkpoint of the run; returns its state: step, cursor and settings. Collective over the job."""
    state = read_state(config)
    folder = Path(config.out) / "checkpoints"
    path, _ = engine.deepspeed.load_checkpoint(str(folder), tag=f"step{state['step']}")
    if path is None:
        raise ValueError(
            f"{folder}/step{state['step']}: DeepSpeed can't load this checkpoint for topology {config.topology} with "
            f"engine.zero_stage={config.engine.zero_stage}; resume with the topology ({state['topology']}), world size "
            "and ZeRO stage it was saved with"
        )
    return state


def read_state(config: TrainConfig) -> dict:
    """Read the newest checkpoint's state and compare the settings that can't change; ValueError says what differs."""
    folder = Path(config.out) / "checkpoints"
    latest = folder / "latest"
    if not latest.exists():
        raise ValueError(f"resume=true: {folder} has no checkpoint; set out= to the run's directory, or resume=false")
    tag = latest.read_text(encoding="utf-8").strip()
    state = json.loads((folder / tag / "hsap.json").read_text(encoding="utf-8"))
    for name, value in state["settings"].items():
        if value != _setting(config, name):
            raise ValueError(
                f"resume=true: the run was started with {name}={value}, now it is {_setting(config, name)}; that would "
                "change which tokens come next, so set it back or start a new run"
            )
    return state


def _setting(config: TrainConfig, name: str):
    group, key = name.split(".")
    return getattr(getattr(config, group), key)


def _steps(folder: Path) -> list[int]:
    return [int(p.name[4:]) for p in folder.glob("step*") if p.name[4:].isdigit()]
