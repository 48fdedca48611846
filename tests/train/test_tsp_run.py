"""Training with weights and tokens sharded over the same ranks: one process's numbers, checkpoints for any topology."""

import json

import pytest
import torch

from hsap.train.checkpoints.export import Exported
from tests.parity import Case, arguments, compare, run_world, write_data

pytestmark = pytest.mark.slow
NINE = (9, 3)
STEPS = 4
ALONE = [Case("1x1", zero_stage=0), Case("1x1", zero_stage=0, heads=NINE)]
SHARDED = [
    Case("4x1", zero_stage=1, planner="zigzag", micro_packs=2, tsp_axis="all"),
    Case("4x1", zero_stage=0, planner="zigzag", tsp_axis="all"),
    Case("2x2", zero_stage=1, planner="sap", tsp_axis="intra", heads=NINE),
    Case("2x1", dp=2, zero_stage=1, planner="zigzag", micro_packs=1, tsp_axis="all"),
    Case("2x1", dp=2, zero_stage=0, planner="zigzag", micro_packs=2, tsp_axis="all", heads=NINE),
]


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one process and of four, each going on from a checkpoint of the other's first steps too."""
    root = tmp_path_factory.mktemp("tsp")
    data = write_data(root)

    def told(case, name, steps=STEPS, *more):
        extra = ["train.save_every=2", "train.keep=9", f"data.eval_path={data}", "train.eval_every=4", *more]
        return [*arguments(case, data, root / name, steps), *extra]

    run_world(1, [told(case, f"alone{i}") for i, case in enumerate(ALONE)], root)
    run_world(4, [told(case, f"{i}") for i, case in enumerate(SHARDED)], root)
    return root


@pytest.mark.parametrize("index", range(len(SHARDED)), ids=[case.name for case in SHARDED])
def test_gradients_loss_and_norm_are_one_process_s(runs, index):
    case = SHARDED[index]
    difference = compare(runs / f"alone{ALONE.index(case.base)}", runs / f"{index}")
    assert difference.ok, difference
