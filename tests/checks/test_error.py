"""`hsap check error`: what a wire in bf16 costs at eight ranks, by the command, in this process."""

import json

from hsap.cli import main as hsap
from hsap.train.overrides import know_project
from tests.parity import REPOSITORY, Case, arguments, write_data


def test_the_command_measures_each_tensor_under_each_mask(tmp_path, capsys):
    know_project(REPOSITORY)
    case = Case("8x1", dtype="bf16", masks="window:24+causal", planner="zigzag")
    given = [*arguments(case, write_data(tmp_path), tmp_path / "out"), "wire_dtype=bf16"]
    assert hsap(["check", "error", "--json", *given, "check.error_budget=1.05"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["budget"] == 1.05 and found["topology"] == "8x1"
    assert len(found["measured"]) == 2 * 2 * 4, "wires, masks, tensors"
    worst = {
        wire: max(one["ratio"] for one in found["measured"] if one["wire_dtype"] == wire) for wire in ("bf16", "fp32")
    }
    assert worst["bf16"] > 1.05 > worst["fp32"]
    assert hsap(["check", "error", *given, "check.error_budget=9"]) == 0
    told = capsys.readouterr().out
    assert "bf16 at 8x1, planner zigzag" in told and told.rstrip().endswith("the budget is 9")
    assert not (tmp_path / "out").exists()
