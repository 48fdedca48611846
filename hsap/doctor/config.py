"""Config: what train.py would refuse of a configuration, group by group, one paragraph each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hsap.doctor.report import FAILED, OK, Line
from hsap.ir.check import printable
from hsap.keys import read
from hsap.planners import check_options
from hsap.train.composing import choose, single
from hsap.train.config import GROUPS, train_config
from hsap.train.launch import is_message
from hsap.train.processes import look_around


def check_config(overrides: Sequence[str]) -> list[Line]:
    """Compose as train.py does, check everything that it would before ranks start, and say what it would refuse."""
    if not overrides:
        return [Line("configuration", OK, "none given; name train.py's overrides to have one checked")]
    told = list(dict.fromkeys(_faults(overrides)))
    if told:
        return [Line("configuration", FAILED, one) for one in told]
    return [Line("configuration", OK, f"train.py would start: {' '.join(overrides)}")]


def _faults(overrides: Sequence[str]) -> Iterator[str]:
    try:
        values = single("doctor", overrides)
        for name, kind in GROUPS.items():
            yield from _fault_of_group(name, kind, values)
        yield from _fault_of_planner(values)
        choice = choose(values, look_around(os.environ))
        out = values.get("out") or os.path.join(tempfile.gettempdir(), f"hsap-doctor-{os.getpid()}")
        made = train_config(values, choice.world_size, choice.device, str(out))

        from hsap.train.inputs import check, check_kernel

        _, model = check(made)
        check_kernel(made, model)
    except Exception as error:
        if not is_message(error):
            raise
        yield printable(error)


def _fault_of_group(name: str, kind: type, values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a group by itself, so that the faults of several are told at once."""
    section = values.get(name)
    if isinstance(section, Mapping):
        try:
            read(kind, f"{name}.", section)
        except ValueError as error:
            yield printable(error)


def _fault_of_planner(values: Mapping[str, Any]) -> Iterator[str]:
    section = values.get("planner")
    if isinstance(section, Mapping) and isinstance(section.get("name"), str):
        try:
            check_options(section["name"], {key: value for key, value in section.items() if key != "name"})
        except ValueError as error:
            yield printable(error)
