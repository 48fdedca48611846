"""What the data's public door refuses: damaged cursors, settings of another kind, token ids that don't fit."""

import json
import math

import pytest

from hsap.data.loader import StepLoader, eval_batches
from hsap.data.packing import Packing, PackStream

NOT_WHOLE = (None, "8", 1.5, 8.0, math.nan, True, [8], -1, 10**30)
LENGTHS = [5, 3, 8, 1, 7, 2]


def stream():
    return PackStream(LENGTHS, Packing(8), 2, seed=3)


@pytest.fixture
def store(make_store):
    return make_store(LENGTHS)


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("value", [*NOT_WHOLE, 10**9])
@pytest.mark.parametrize("name", ["stage", "epoch", "first", "offset", "pack", "before"])
def test_a_damaged_place_in_a_cursor_is_refused_at_once(steps, name, value):
    run = stream()
    for _ in range(steps):
        next(run)
    state = run.state_dict()
    number = ["stage", "epoch", "first", "offset", "pack", "before"].index(name)
    if (name, value) == ("before", None):
        value = 0
    state["place"][number] = value
    with pytest.raises(ValueError, match="data cursor"):
        stream().load_state_dict(state)


@pytest.mark.parametrize("value", [v for v in NOT_WHOLE if v != 10**30])
def test_a_damaged_step_in_a_cursor_is_refused(value):
    with pytest.raises(ValueError, match="data cursor's step"):
        stream().load_state_dict(stream().state_dict() | {"step": value})


@pytest.mark.parametrize("place", [None, 3, "place", [], [0], {}, [0] * 6])
def test_what_is_no_place_is_refused(place):
    with pytest.raises(ValueError, match="data cursor"):
        stream().load_state_dict(stream().state_dict() | {"place": place})


@pytest.mark.parametrize("cursor", [None, [], "x", 3])
def test_what_is_no_cursor(cursor):
    with pytest.raises(ValueError, match="the data cursor"):
        stream().load_state_dict(cursor)


def test_every_true_cursor_is_accepted():
    run = stream()
    for _ in range(30):
        again = stream()
        again.load_state_dict(json.loads(json.dumps(run.state_dict())))
        assert next(again) == next(run)


@pytest.mark.parametrize("value", [*NOT_WHOLE, 0, 10**9])
def test_start_steps_out_of_reach_are_refused(store, value):
    with pytest.raises(ValueError, match="start step"):
        stream().seek(value)
    with pytest.raises(ValueError, match="start step"):
        StepLoader(store, Packing(8), packs_per_step=2, start_step=value)


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize(
    "name",
    [
        *("pack_tokens", "window", "max_delay_steps"),
        *("packs_per_step", "seed", "micro_packs", "dp_size", "dp_rank"),
    ],
)
def test_settings_must_be_whole_numbers(store, name, value):
    with pytest.raises(ValueError, match=r"must be a whole number|multiple of"):
        if name in ("pack_tokens", "window", "max_delay_steps"):
            Packing(**{"pack_tokens": 8, name: value})
        else:
            StepLoader(store, Packing(8), **{"packs_per_step": 2, name: value})


@pytest.mark.parametrize("value", [v for v in NOT_WHOLE if v is not None and v != 10**30])
def test_a_number_of_packs_to_evaluate(store, value):
    with pytest.raises(ValueError, match="max_packs"):
        eval_batches(store, Packing(8), max_packs=value)
    assert eval_batches(store, Packing(8), max_packs=0).num_tokens == 0
