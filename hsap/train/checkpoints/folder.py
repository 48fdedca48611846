"""The folder of a run's checkpoints: written so that a crash at any moment leaves the newest whole one, and checked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from hsap.files import Written, replace, sha256, sync
from hsap.ir.check import Refused, fields, instance, one_line, shown, whole
from hsap.steps import METRICS
from hsap.train.config import TrainConfig

CHECKPOINTS = "checkpoints"
LATEST, STATE = "latest", "hsap.json"
"""The file that names the newest checkpoint, and the one in a checkpoint that says what it is."""
_NEEDED = ("step", "cursor", "topology", "identity", "adam_steps", "files", "sha256")
_NAME, _FILE = re.compile(r"step(0|[1-9][0-9]*)"), re.compile(r"rank(0|[1-9][0-9]*)\.safetensors")
"""Of a checkpoint and of its files; no name that a file gives leads elsewhere."""


def folder(config: TrainConfig) -> Path:
    """Where the checkpoints of a run lie."""
    return Path(config.out) / CHECKPOINTS


def unfinished(home: Path, step: int) -> Path:
    """Where the checkpoint of a step lies while it is written."""
    return home / f".step{step}.tmp"


def publish(home: Path, step: int, state: Mapping[str, object], files: Mapping[str, Written], keep: int) -> None:
    """Make the files in `unfinished` a checkpoint and the newest one; then drop all but the newest `keep`.

    Every byte is on the disk before a name leads to it: a crash anywhere leaves `latest` at a whole checkpoint. OSError
    where the disk is full, or the like.
    """
    fresh, home_now = unfinished(home, step), home / f"step{step}"
    for name, written in files.items():
        if not (fresh / name).is_file() or (fresh / name).stat().st_size != written.size:
            raise FileNotFoundError(
                f"{fresh / name} isn't there as a rank wrote it; out= must lie where all nodes see the same files"
            )
    content = {**state, "files": {name: asdict(written) for name, written in files.items()}}
    replace(fresh / STATE, json.dumps({**content, "sha256": digest(content)}, indent=1).encode())
    # A checkpoint of this step can only be what a run that was resumed from an earlier one has left.
    _drop(home_now)
    os.rename(fresh, home_now)
    sync(home)
    replace(home / LATEST, home_now.name.encode())
    steps = _steps(home)
    for old in [s for s in steps if s > step] + [s for s in steps if s <= step][:-keep]:
        _drop(home / f"step{old}")


def clear_unfinished(home: Path) -> None:
    """Drop what a crash while writing has left."""
    for path in home.glob(".step*"):
        shutil.rmtree(path, ignore_errors=True)
    (home / f".{LATEST}").unlink(missing_ok=True)


def read_state(config: TrainConfig) -> dict:
    """Read what the newest checkpoint is, and see whether its files are there: step, cursor, identity and more.

    ValueError where there is none to use; it names what is wrong and the newest good one. The files' content is left to
    `damage`.
    """
    home = folder(config)
    if not (home / LATEST).is_file():
        raise ValueError(f"resume=true: {home} has no checkpoint; set out= to the run's directory, or resume=false")
    tag = _latest(home)
    try:
        if not _NAME.fullmatch(tag):
            raise ValueError("a checkpoint is named stepN and lies beside that file")
        state = read_checkpoint(home / tag)
    except (OSError, ValueError) as error:
        raise refusal(home, tag, str(error)) from error
    if state["step"] > config.train.steps:
        raise ValueError(
            f"resume=true: the newest checkpoint in {home} is of step {state['step']}, but train.steps="
            f"{config.train.steps}; set train.steps to the step at which training shall end"
        )
    return state


def read_checkpoint(checkpoint: Path) -> dict:
    """Read what one checkpoint is, and see whether its files are there; ValueError where it can't be used."""
    state = _state(checkpoint)
    if problem := missing(checkpoint, state):
        raise ValueError(problem)
    return state


def refusal(home: Path, tag: str, problem: str) -> ValueError:
    """Say why a checkpoint isn't used and which one could be; never is another taken in its place unasked."""
    good = next((step for step in reversed(_steps(home)) if f"step{step}" != tag and _is_good(home, step)), None)
    way = (
        f"the newest good one is step{good}: write step{good} into {home / LATEST}"
        if good is not None
        else "there is no other good one: copy it anew from where it is whole, or start a new run with another out="
    )
    return ValueError(f"resume=true: {home / LATEST} names {one_line(tag)}, which can't be used: {problem}; {way}")


def damage(checkpoint: Path, state: dict, names: Iterable[str], said_by: str = STATE) -> str | None:
    """Compare files of a folder with their checksums: None if all agree, else what is wrong with the first.

    state: of a checkpoint, or what else has `files`; said_by: the file that it was read from.
    """
    for name in names:
        try:
            found = sha256(checkpoint / name)
        except OSError as error:
            return f"{checkpoint / name} can't be read ({error.strerror})"
        if found != state["files"][name]["sha256"]:
            return f"{checkpoint / name} is damaged: it doesn't have the SHA-256 that {said_by} says"
    return None


def newest_good(home: Path) -> int | None:
    """Step of the newest checkpoint whose every byte is as it was written, of `latest` and those before it."""
    named = _NAME.fullmatch(_latest(home)) if (home / LATEST).is_file() else None
    steps = [step for step in _steps(home) if named is None or step <= int(named[1])]
    return next((step for step in reversed(steps) if _is_good(home, step)), None)


def check_identity(state: dict, identity: dict) -> None:
    """Compare settings that a resumed run must share, all or some of them; ValueError says what differs."""
    was = state["identity"]
    differs = [
        f"{name} was {one_line(was.get(name))}, now {one_line(now)}"
        for name, now in identity.items()
        if was.get(name) != now
    ]
    if differs:
        raise ValueError(
            f"resume=true: the checkpoint of step {state['step']} (topology {one_line(state['topology'])}) belongs to "
            f"another run: {'; '.join(differs)}. Data, packing and seed decide which tokens come next, and the model "
            "what the checkpoint's numbers mean; set them back, or start a new run with another out="
        )


def refuse_used(config: TrainConfig) -> None:
    """Refuse a new run in the directory of an old one: its metrics and, one by one, its checkpoints would go."""
    latest = folder(config) / LATEST
    if latest.is_file():
        raise ValueError(
            f"out={config.out} holds the checkpoints of a run ({one_line(_latest(folder(config)))}); set "
            "resume=true to go on with it, or another out=, or remove it"
        )
    metrics = Path(config.out) / METRICS
    # An empty one is of a run that never finished a step.
    if metrics.is_file() and metrics.stat().st_size:
        raise ValueError(
            f"out={config.out} holds the metrics of a run that kept no checkpoint to go on from; set another out=, or "
            "remove it"
        )


def _latest(home: Path) -> str:
    return (home / LATEST).read_text(encoding="utf-8", errors="replace").strip()


def _state(checkpoint: Path) -> dict:
    """Read what a checkpoint is; ValueError, which names the file, for what no run can have written there."""
    path = checkpoint / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read ({error})") from error
    missing = [name for name in _NEEDED if not isinstance(state, dict) or name not in state]
    if missing:
        raise ValueError(f"{path} can't be read (it lacks {', '.join(missing)})")
    if state["sha256"] != digest({name: value for name, value in state.items() if name != "sha256"}):
        raise ValueError(f"{path} is damaged: it doesn't have the SHA-256 that it says")
    try:
        _check_fields(state)
    except ValueError as error:
        raise ValueError(f"{path} is no checkpoint of a run: {error}") from error
    if checkpoint.name != f"step{state['step']}":
        raise ValueError(f"{path} is of step {state['step']}, whose checkpoint is named step{state['step']}; rename it")
    return state


def _check_fields(state: dict) -> None:
    for name in ("step", "adam_steps"):
        whole(name, state[name], 0)
    for name in ("cursor", "identity", "files"):
        instance(name, state[name], dict, "an object")
    if state["cursor"].get("step") != state["step"]:
        raise Refused(f"the data cursor is of step {shown(state['cursor'].get('step'))}, the rest of {state['step']}")
    for name, file in state["files"].items():
        if not _FILE.fullmatch(name):
            raise Refused(f"files has {shown(name)}; a rank's is rankR.safetensors")
        fields(f"files.{name}", file, ("size", "sha256"))
        whole(f"files.{name}.size", file["size"], 0)


def missing(checkpoint: Path, state: dict) -> str | None:
    """Say what is wrong with the first of a folder's files that isn't there, or has another size; None if all are."""
    for name, file in state["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != file["size"]:
            return f"{path} is damaged: it has {path.stat().st_size} bytes, and had {file['size']}"
    return None


def _is_good(home: Path, step: int) -> bool:
    checkpoint = home / f"step{step}"
    try:
        state = _state(checkpoint)
    except ValueError:
        return False
    return damage(checkpoint, state, state["files"]) is None


def digest(content: Mapping[str, object]) -> str:
    """Give the SHA-256 of JSON values, hexadecimal."""
    # As it will be read again: a tuple becomes a list, a number's key a word.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()).hexdigest()


def _steps(home: Path) -> list[int]:
    return sorted(int(path.name[4:]) for path in home.glob("step*") if _NAME.fullmatch(path.name))


def _drop(checkpoint: Path) -> None:
    """Take a checkpoint's name away first: half of one mustn't look like one."""
    if checkpoint.exists():
        gone = checkpoint.with_name(f".{checkpoint.name}.old")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(checkpoint, gone)
        shutil.rmtree(gone, ignore_errors=True)
