"""`hsap check leak` and `hsap check parity` on ranks, good and broken; what is compared, by itself."""

import math

import pytest
import torch

from hsap.checks.difference import Outcome, difference, errors
from hsap.checks.small import quiet, small
from tests.checks.ranks import check
from tests.parity import Case, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("checks")
    write_data(made)
    return made


@pytest.mark.slow
def test_a_good_configuration_passes(folder):
    case = Case("2x1", zero_stage=1, micro_packs=2, planner="zigzag", tsp_axis="all")
    code, found = check(folder, "parity", case)
    assert code == 0 and found["ok"], found
    assert all(0 <= found["differences"][name] <= bar for name, bar in found["bars"].items())
    assert "TSP over 2" in found["about"] and "accumulation 2" in found["about"]


@pytest.mark.slow
def test_a_wrong_scale_is_over_the_bars_everywhere(folder):
    code, found = check(folder, "parity", Case("2x1", zero_stage=2), "scale")
    assert code == 1 and not found["ok"]
    # Gradients averaged over two ranks and scaled for one: half of what they should be; the loss is right.
    for name in ("gradient", "all_gradients", "norm"):
        assert found["differences"][name] == pytest.approx(0.5, rel=1e-3)
    assert found["differences"]["loss"] < 1e-6
    assert len(found["worst"]) == 5 and all(name.startswith(("model.", "lm_head.")) for name in found["worst"])


@pytest.mark.slow
def test_attention_that_ignores_documents_leaks(folder):
    code, found = check(folder, "leak", Case("2x1", zero_stage=1, micro_packs=1), "borders")
    assert code == 1, found
    (group,) = found["groups"]
    wheres = {(leak["where"], leak["direction"]) for leak in group["leaks"]}
    assert ("model.layers.0", "forward") in wheres and all(leak["documents"] for leak in group["leaks"]), found


def outcome(scale: float = 1.0, **changed: float) -> Outcome:
    made = {name: torch.arange(1.0, 7) * scale for name in ("a", "b")}
    made |= {name: made[name] * factor for name, factor in changed.items()}
    return Outcome(2.0 * scale, 3.0 * scale, made)


def test_differences_are_relative_and_name_the_parameter():
    found = difference(outcome(), outcome(b=1 + 1e-5))
    assert found.parameter == "b" and found.gradient == pytest.approx(1e-5, rel=1e-2) and not found.ok
    assert found.all_gradients == pytest.approx(1e-5 / math.sqrt(2), rel=1e-2)
    assert difference(outcome(), outcome()).ok
    assert difference(outcome(), outcome(b=1 + 1e-3), torch.bfloat16).ok
    assert difference(outcome(), outcome(2.0)).loss == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_what_is_not_finite_is_over_every_bar(factor):
    found = difference(outcome(), outcome(a=factor), torch.bfloat16)
    assert not found.ok and found.gradient == math.inf and found.parameter == "a"


def test_gradients_that_are_nothing():
    zero = {"a": torch.zeros(3), "b": torch.ones(3)}
    by_name, together = errors(zero, {"a": torch.full((3,), 1e-9), "b": torch.ones(3)})
    assert by_name["a"] < 1e-5 and together < 1e-5
    assert errors({"a": torch.zeros(3)}, {"a": torch.zeros(3)}) == ({"a": 0.0}, 0.0)
    assert errors({"a": torch.zeros(3)}, {"a": torch.ones(3)})[1] == math.inf
    with pytest.raises(ValueError, match="b has a gradient in one"):
        errors(zero, {"a": torch.zeros(3)})


def test_batches_are_made_small_and_said_to_be():
    values = {
        "resume": False,
        "data": {"pack_tokens": 8192, "curriculum": [[1, 64]]},
        "train": {"packs_per_step": 64, "micro_packs": 2, "eval_every": 5, "steps": 100},
        "check": {"leak": True},
        "profile": None,
    }
    made, told = small(quiet(values), world_size=64, group_size=32)
    assert made["data"] == {"pack_tokens": 1024, "curriculum": None}
    assert made["train"]["packs_per_step"] == 8 and made["train"]["steps"] == 1 and not made["train"]["eval_every"]
    assert told == "data.pack_tokens 8192 → 1024, train.packs_per_step 64 → 8"
    assert not made["check"]["leak"] and made["profile"] is None and values["train"]["steps"] == 100
    assert small(made, 64, 32) == (made, "")
    with pytest.raises(ValueError, match="resume=true"):
        quiet({**values, "resume": True})
