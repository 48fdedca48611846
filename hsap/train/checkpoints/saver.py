"""Saving and loading a run: collective over the job, in the foreground or, from a copy, behind the next steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.files import Written
from hsap.position import Phase, Position
from hsap.runtime.groups import job_store
from hsap.tensorfile import write_tensors
from hsap.train.checkpoints import masters
from hsap.train.checkpoints.folder import clear_unfinished, damage, folder, publish, refusal, unfinished
from hsap.train.checkpoints.tensors import RANDOM, Pieces, key
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine

_PATIENCE = timedelta(hours=1)
"""For the slowest rank's disk."""


class Saver:
    """Saves checkpoints of a run; every rank has one, made and called at the same steps.

    Each rank writes what it holds, and tells rank 0 size and checksum through torch's store, not by a collective: so a
    background thread never meets the training's own collectives. Rank 0 makes a checkpoint of the files and tells all.
    identity: settings that a resumed run must share, JSON values by name. position: where every tensor is noted.
    """

    def __init__(self, config: TrainConfig, identity: dict, position: Position | None = None) -> None:
        self.config, self.identity, self.position = config, identity, position or Position()
        self.home = folder(config)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: a waiting `get` must not hold up anything else.
        self.store = job_store()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._told: str | None = None
        if self.rank == 0:
            clear_unfinished(self.home)
        dist.barrier()

    def save(self, engine: Engine, step: int, cursor: dict) -> None:
        """Save after `step`; in the background, all that is waited for is a copy, and the checkpoint before this one.

        ValueError: a rank couldn't write (or, in the background, the last time); the checkpoints before are untouched.
        """
        self.position.phase(Phase.SAVE)
        self.wait()
        tensors, adam_steps = masters.capture(engine.deepspeed)
        tensors |= _random_states(engine.device)
        state = self._state(step, cursor, adam_steps)
        if not self.config.train.save_in_background:
            self._write(step, tensors, state)
            return
        copies = {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in tensors.items()}
        self._thread = threading.Thread(target=self._write_behind, args=(step, copies, state), name="hsap-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for a checkpoint in the background; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_behind(self, step: int, tensors: dict[str, Tensor], state: dict) -> None:
        try:
            self._write(step, tensors, state)
        except Exception as error:
            self._error = error

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict) -> None:
        try:
            unfinished(self.home, step).mkdir(parents=True, exist_ok=True)

            def content(name: str) -> Tensor:
                self.position.tick()
                return tensors[name]

            said = asdict(write_tensors(unfinished(self.home, step) / _file(self.rank), tensors, content))
        except OSError as error:
            said = {"error": f"rank {self.rank}: {error}"}
        self.store.set(self._key(step, self.rank), json.dumps(said))
        self._note(Phase.SAVED)
        if self.rank == 0:
            self.store.set(self._key(step, "done"), self._publish(step, state))
            self._note(Phase.SAVED)
        self.store.wait([self._key(step, "done")], _PATIENCE)
        if problem := self.store.get(self._key(step, "done")).decode():
            raise ValueError(
                f"the checkpoint of step {step} couldn't be written ({problem}); the ones before it in {self.home} are "
                "untouched: make room, or mend what is said, and go on with resume=true"
            )

    def _publish(self, step: int, state: dict) -> str:
        """On rank 0: wait for all ranks and make the checkpoint; gives what went wrong, empty if nothing did."""
        keys = [self._key(step, rank) for rank in range(self.world_size)]
        self.store.wait(keys, _PATIENCE)
        self._note(Phase.SAVE)
        if self._told is not None:  # all have read it: they are further on
            self.store.delete_key(self._told)
        self._told = self._key(step, "done")
        told = [json.loads(self.store.get(name)) for name in keys]
        if errors := [one["error"] for one in told if "error" in one]:
            # What is half written would hold the room that is wanted.
            clear_unfinished(self.home)
            return "; ".join(errors)
        for name in keys:
            self.store.delete_key(name)
        try:
            files = {_file(rank): Written(**one) for rank, one in enumerate(told)}
            publish(self.home, step, state, files, self.config.train.keep)
        except OSError as error:
            clear_unfinished(self.home)
            return str(error)
        return ""

    def _note(self, phase: Phase) -> None:
        """Note what is done for a checkpoint, unless behind the next steps, which note themselves."""
        if self._thread is None:
            self.position.phase(phase)

    def _key(self, step: int, who: int | str) -> str:
        # A store takes no name that isn't UTF-8, as a folder's may not be.
        return f"hsap/checkpoint/{self.config.out!a}/{step}/{who}"

    def _state(self, step: int, cursor: dict, adam_steps: int) -> dict:
        config = self.config
        return {
            "step": step,
            "cursor": cursor,
            "adam_steps": adam_steps,
            "topology": config.topology,
            "world_size": config.world_size,
            "zero_stage": config.engine.zero_stage,
            "planner": {"name": config.planner.name, **config.planner.options},
            "identity": self.identity,
            "config": json.loads(json.dumps(asdict(config), default=_plain)),
        }


def load(engine: Engine, config: TrainConfig, state: dict) -> None:
    """Load the checkpoint that `read_state` has found and `check_identity` let pass. Collective over the job.

    The ranks share the work of comparing checksums. ValueError: a damaged file, and the newest checkpoint without one.
    """
    checkpoint = folder(config) / f"step{state['step']}"
    names = sorted(state["files"])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bad = -1
    for i, name in enumerate(names):
        if i % world_size == rank and damage(checkpoint, state, [name]):
            bad = max(bad, i)
    worst = torch.tensor(bad, device=engine.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if (bad := int(worst)) >= 0:
        raise refusal(checkpoint.parent, checkpoint.name, damage(checkpoint, state, [names[bad]]) or names[bad])
    pieces = Pieces(checkpoint / name for name in names)
    masters.restore(engine.deepspeed, pieces, state["adam_steps"])
    engine.deepspeed.global_steps = state["step"]
    # Training itself draws no random number; what a rank of this number had drawn from is set for whoever does.
    for name, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        random = pieces.whole(RANDOM, f"{name}/{rank}")
        if random is not None and (name == "cpu" or engine.device.type == "cuda"):
            set_state(random)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {key(RANDOM, f"{name}/{dist.get_rank()}", 0): state for name, state in states.items()}


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)
