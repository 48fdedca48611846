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

LATEST, STATE = "latest", "hsap.json"
"""The file that names the newest checkpoint, and a checkpoint's own part of ours beside DeepSpeed's files."""


def save(engine: Engine, config: TrainConfig, step: int, cursor: dict, identity: dict) -> None:
    """Save after `step`, then drop all but the newest `train.keep`. Collective over the job.

    identity: settings that a resumed run must share, JSON values by name.
    """
    home = folder(config)
    tag = f"step{step}"
    engine.deepspeed.save_checkpoint(str(home), tag=tag, save_latest=False)
    dist.barrier()
    if dist.get_rank() == 0:
        state = {"step": step, "cursor": cursor, "topology": config.topology, "identity": identity}
        (home / tag / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        fresh = home / "latest.tmp"
        fresh.write_text(tag, encoding="utf-8")
        os.replace(fresh, home / LATEST)
        # Beyond this step lies only what a run that was resumed from an earlier one never finished.
        steps = sorted(_steps(home))
        for old in [s for s in steps if s > step] + [s for s in steps if s <= step][: -config.train.keep]:
            shutil.rmtree(home / f"step{old}", ignore_errors=True)
    dist.barrier()


def load(engine: Engine, config: TrainConfig, state: dict) -> None:
    """Load the checkpoint that `read_state` has found and `check_identity` let pass. Collective over the job."""
    path, _ = engine.deepspeed.load_checkpoint(str(folder(config)), tag=f"step{state['step']}")
    if path is None:
        raise ValueError(
            f"{folder(config)}/step{state['step']}: files of DeepSpeed are missing; copy the checkpoint anew, or name "
            f"an older one in {folder(config) / LATEST}"
        )


def read_state(config: TrainConfig) -> dict:
    """Read the newest checkpoint's state: step, cursor, topology, identity. ValueError where there is none to use."""
    home = folder(config)
    latest = home / LATEST
    if not latest.is_file():
        raise ValueError(f"resume=true: {home} has no checkpoint; set out= to the run's directory, or resume=false")
    path = home / latest.read_text(encoding="utf-8").strip() / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if missing := {"step", "cursor", "topology", "identity"} - state.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"resume=true: {latest} names a checkpoint whose {path} can't be read ({error}); write the name of another "
            f"checkpoint into {latest}, or start a new run"
        ) from error
    if state["step"] > config.train.steps:
        raise ValueError(
            f"resume=true: the newest checkpoint in {home} is of step {state['step']}, but train.steps="
            f"{config.train.steps}; set train.steps to the step at which training shall end"
        )
    return state


def check_identity(state: dict, identity: dict) -> None:
    """Compare settings that a resumed run must share, all or some of them; ValueError says what differs."""
    was = state["identity"]
    differs = [f"{name} was {was.get(name)}, now {now}" for name, now in identity.items() if was.get(name) != now]
    if differs:
        raise ValueError(
            f"resume=true: the checkpoint of step {state['step']} (topology {state['topology']}) belongs to another "
            f"run: {'; '.join(differs)}. Data, packing and seed decide which tokens come next, and world size, ZeRO "
            "stage and dtype how the optimizer's state lies in the files; set them back, or start a new run with "
            "another out="
        )


def refuse_used(config: TrainConfig) -> None:
    """Refuse a new run in the directory of an old one: its metrics and, one by one, its checkpoints would go."""
    latest = folder(config) / LATEST
    if latest.is_file():
        raise ValueError(
            f"out={config.out} holds the checkpoints of a run ({latest.read_text(encoding='utf-8').strip()}); set "
            "resume=true to go on with it, or another out="
        )


def folder(config: TrainConfig) -> Path:
    """Where the checkpoints of a run lie."""
    return Path(config.out) / "checkpoints"


def _steps(home: Path) -> list[int]:
    return [int(p.name[4:]) for p in home.glob("step*") if p.name[4:].isdigit()]
