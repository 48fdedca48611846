"""Error: what splitting attention over a configuration's ranks costs in accuracy, measured in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from hsap.checks.launch import configured
from hsap.train.budget import JUDGED, TENSORS, Measured, weigh
from hsap.train.config import TrainConfig
from hsap.train.inputs import check, read_inputs

BUDGET = 1.1
"""What is judged by where check.error_budget isn't set."""


def check_error(overrides: Sequence[str]) -> tuple[TrainConfig, list[Measured]]:
    """Measure the attention of a configuration's first micro-batch; the configuration has a budget then.

    Under its wire dtype and, where that is over the budget, under float32's. overrides: as of train.py. ValueError.
    """
    config, _, _ = configured(overrides)
    if config.check.error_budget is None:
        config = replace(config, check=replace(config.check, error_budget=BUDGET))
    os.environ["DS_ACCELERATOR"] = config.engine.device or "cpu"
    check(config)
    return config, weigh(config, read_inputs(config), torch.device(config.engine.device or "cpu"))


def run_error(overrides: Sequence[str], as_json: bool) -> int:
    """Measure and tell: 0 where the configuration's own wire dtype keeps to the budget, 1 where it doesn't."""
    config, found = check_error(overrides)
    budget = config.check.error_budget
    assert budget is not None
    ok = found[0].worst[0] <= budget
    print(json.dumps(_figures(config, found, ok)) if as_json else _table(config, found, budget, ok))
    return 0 if ok else 1


def _figures(config: TrainConfig, found: Sequence[Measured], ok: bool) -> dict[str, object]:
    return {
        "ok": ok,
        "budget": config.check.error_budget,
        "topology": config.topology,
        "dtype": config.engine.dtype,
        "measured": [
            {"wire_dtype": one.wire, "mask": mask, "tensor": name, "rmse": float(one.split[row, place]),
             "one_device_rmse": float(one.alone[row, place]), "ratio": float(one.ratios[row, place])}
            for one in found
            for row, mask in enumerate(one.masks)
            for place, name in enumerate(TENSORS) if name in JUDGED
        ],
    }  # fmt: skip


def _table(config: TrainConfig, found: Sequence[Measured], budget: float, ok: bool) -> str:
    places = [TENSORS.index(name) for name in JUDGED]
    width = max(len(mask) for one in found for mask in one.masks) + 2
    lines = [
        f"error of attention against float64 (root mean square), {config.engine.dtype} at {config.topology}, planner "
        f"{config.planner.name}, over that of one device:",
        "",
        f"{'mask':{width}}{'wire':6}"
        + "".join(f"{name:>9}" for name in JUDGED)
        + "   one device's: "
        + ", ".join(JUDGED),
    ]
    for one in found:
        for row, mask in enumerate(one.masks):
            ratios = "".join(f"{one.ratios[row, place]:9.3f}" for place in places)
            alone = ", ".join(f"{one.alone[row, place]:.1e}" for place in places)
            lines.append(f"{mask:{width}}{one.wire:6}{ratios}   {alone}")
    ratio, tensor, mask = found[0].worst
    told = f"the highest is {ratio:.3f}, of {tensor} under {mask}; the budget is {budget:g}"
    if not ok:
        wider = found[-1].worst[0]
        way = (
            "wire_dtype=fp32 keeps to it" if wider <= budget else f"wire_dtype=fp32 has {wider:.3f}, and is over it too"
        )
        told += f": {way}" if len(found) > 1 else ": float32 is on the wire already"
    return "\n".join([*lines, "", told])
