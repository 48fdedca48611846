"""Command-line arguments as people and launchers write them, turned into what Hydra parses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

GROUPS = ("model", "data", "cluster", "engine", "optim", "train", "experiment")
"""The folders of configs/ that an override chooses a file of; planner, which has one too, chooses by name in code."""
_MULTIRUN = ("-m", "--multirun")


def rewrite(arguments: Sequence[str]) -> list[str]:
    """Make the arguments fit for Hydra: pure, and the same for an argument already rewritten.

    `--local_rank=N` and `--local-rank N`, which launchers insert, go. `topology=`, `+topology=` become `++topology=`,
    so that the key may be set over an experiment that sets it, or swept. `planner=NAME` becomes `++planner.name=NAME`,
    because planners are a table in code and need no file each. Every other dotted key becomes `++KEY=` too: planners
    have options that no file lists, and for a misspelt key the check that follows knows a better answer than Hydra.
    `+GROUP=NAME` loses its plus, as in `+experiment=smoke`, because every group already has a default.
    `model.from=` brings `model=huggingface` with it where no model is chosen: another file's sizes would only
    contradict the folder's.
    Overrides go first, because Hydra's parser wants them side by side; flags and their values follow in their order.
    """
    overrides: list[str] = []
    rest: list[str] = []
    skip_value = False
    for argument in arguments:
        if skip_value:
            skip_value = False
        elif re.fullmatch(r"--local[_-]rank", argument):
            skip_value = True
        elif re.match(r"--local[_-]rank=", argument):
            continue
        elif re.match(r"~|[^-].*=", argument, re.DOTALL):
            overrides.append(_rewrite_override(argument))
        else:
            rest.append(argument)
    if any(re.match(r"\++model\.from=", one) for one in overrides) and not any(
        re.match(r"model=", one) for one in overrides
    ):
        overrides.append("model=huggingface")
    return overrides + rest


def wants_multirun(arguments: Sequence[str]) -> bool:
    """Tell whether the arguments ask for a sweep."""
    return any(a in _MULTIRUN or a.lower() == "hydra.mode=multirun" for a in arguments)


def _rewrite_override(argument: str) -> str:
    if re.match(rf"\++({'|'.join(GROUPS)})=", argument):
        return argument.lstrip("+")
    match = re.match(r"\+{0,2}(topology|planner|(?!hydra\.)\w+(?:\.\w+)+)=(.*)", argument, re.DOTALL)
    if match is None:
        return argument
    key = "planner.name" if match[1] == "planner" else match[1]
    return f"++{key}={match[2]}"


def know_project(folder: Path) -> None:
    """Let configurations name files of the project as `${project:PATH}`, whatever directory a run is started in."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("project", lambda path: str(folder / path), replace=True)
