"""Small: a configuration's batch made small enough for one process, and its run one step that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PACK_TOKENS, ROWS_OF_A_RANK = 512, 32
"""Tokens of a pack, or more where an SP group is so large that its ranks would have few."""
ACCUMULATION = 2
_QUIET = {
    "train.steps": 1,
    "train.eval_every": 0,
    "train.save_every": 0,
    "train.tensorboard": False,
    "profile.steps": None,
    "profile.nvtx": False,
    "check.leak": False,
}


def quiet(values: Mapping[str, Any]) -> dict[str, Any]:
    """One step, without evaluation, checkpoints and all else that a run leaves or tells."""
    if values.get("resume"):
        raise ValueError(
            "resume=true: a check runs on the weights that training begins with, of train.seed or model.from; export "
            "the checkpoint (hsap export) and give it as model.from, or leave resume out"
        )
    return _with(values, _QUIET)


def small(values: Mapping[str, Any], world_size: int, group_size: int) -> tuple[dict[str, Any], str]:
    """The same with short packs, and at most two micro-steps of accumulation; also what was reduced, in words."""
    data, train = values["data"], values["train"]
    changes: dict[str, Any] = {}
    tokens = max(PACK_TOKENS, ROWS_OF_A_RANK * group_size)
    if _number(data.get("pack_tokens")) and data["pack_tokens"] > tokens:
        changes |= {"data.pack_tokens": tokens, "data.curriculum": None}
    packs, micro = train.get("packs_per_step"), train.get("micro_packs")
    if _number(packs) and _number(micro):
        most = max(world_size // group_size, 1) * micro * ACCUMULATION
        if packs > most:
            changes["train.packs_per_step"] = most
    shown = [f"{key} {_at(values, key)} → {new}" for key, new in changes.items() if new is not None]
    return _with(values, changes), ", ".join(shown)


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at(values: Mapping[str, Any], key: str) -> Any:
    group, name = key.split(".")
    return values[group].get(name)


def _with(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with other values; keys are dotted. What should be a group and is none is left to its check."""
    out = dict(values)
    for key, value in changes.items():
        group, name = key.split(".")
        if isinstance(out.get(group), Mapping):
            out[group] = {**out[group], name: value}
    return out
