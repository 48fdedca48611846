"""The stored form: damage anywhere in the header is a ValueError of one paragraph, and paths are named."""

import json
import math

import numpy as np
import pytest

from hsap.api import compile
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.stored import MAGIC

START = len(MAGIC) + 8


@pytest.fixture(scope="module")
def problem():
    return Problem(Layout.from_lengths([7, 5]), HeadShape(4, 2, 8), Topology(2, 1))


@pytest.fixture(scope="module")
def stored(problem):
    return compile(problem, "sap").to_bytes()


def rewritten(data: bytes, change) -> bytes:
    """The stored form with another header; `change` edits it or gives its new text."""
    size = int.from_bytes(data[len(MAGIC) : START], "little")
    header = json.loads(data[START : START + size])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + data[START + size :]


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(header):
        for key in path:
            header = header[key]
        header[last] = value

    return change


def drop(name):
    return lambda header: header.pop(name) and None


def test_an_untouched_header_loads(stored, tmp_path):
    again = rewritten(stored, lambda header: None)
    assert Plan.from_bytes(again).to_bytes() == stored
    (tmp_path / "a.plan").write_bytes(again)
    assert Plan.load(tmp_path / "a.plan").to_bytes() == stored


@pytest.mark.parametrize(
    "change",
    [
        *(drop(name) for name in ("hash", "columns", "problem", "planner", "options")),
        *(put("columns", 0, 1, dtype) for dtype in (",", "a5", "i8,i8", "<i4", "O", None, 8, ["<i8"])),
        *(put("columns", 0, 2, shape) for shape in (None, [], [-1, 2], [1.5, 2], ["1", 2], [10**30, 2], [True, 2])),
        *(put("columns", 0, 0, name) for name in ("nobody", None, 3, "0.x.y")),
        *(put("columns", value) for value in (None, 3, [3], [[]])),
        *(put("hash", value) for value in (None, 3, "0" * 64)),
        *(put("planner", value) for value in (None, 3)),
        *(put("options", value) for value in (None, [["a", 1]], "a")),
        *(put("choice", {"sap": seconds}) for seconds in (math.nan, math.inf, -math.inf)),
        *(put("options", {"slack": value}) for value in (math.nan, "\ud800")),
        put("planner", "\ud800"),
        lambda header: json.dumps(header | {"choice": {"sap": 7e77}}).replace("7e+77", "7e777").encode(),
        *(put("columns", 0, 1, text) for text in ("a\nb", "a" * 5000)),
        *(put("columns", 0, 2, shape) for shape in (["a\nb", 2], {"a\nb" * 1000: 2})),
        put("columns", 0, 0, "a\nb" * 1000),
        *(put("problem", "heads", {name: 4}) for name in ("a\nb", "a" * 5000)),
        *(put("problem", "cluster", "a\nb" + "c" * most, 4) for most in (1, 5000)),
        put("problem", "cluster", {"name": "a\nb" + "c" * 5000, "ranks_per_node": 0}),
        put("problem", "topology", "a\nb" + "c" * 5000),
        put("problem", "masks", [["causal:" + "1," * 5000 + "1", 1]]),
        put("problem", "masks", [["causal:" + "x" * 5000, 1]]),
        put("problem", "masks", [[[{"name": "a\nb" * 1000, "num_tokens": 7, "slices": [[0, 9, 0, 9]]}], 1]]),
        put("problem", None),
        put("problem", "lengths", [1 << 25]),
        put("problem", "lengths", "75"),
        put("problem", "lengths", [7.0, 5]),
        put("problem", "topology", "5000x1"),
        put("problem", "masks", [["causal"]]),
        put("problem", "arena_multiple", math.nan),
        put("problem", "heads", {"num_q_heads": 4}),
        put("problem", "cluster", "ranks_per_node", 0),
        lambda header: b"[" * 100_000,
        lambda header: b'{"a":' * 100_000,
        lambda header: b"[]",
        lambda header: b"null",
        lambda header: b"\xff\xfe",
        lambda header: b"",
    ],
)
def test_a_damaged_header_is_a_value_error(stored, change, tmp_path):
    path = tmp_path / "a.plan"
    path.write_bytes(rewritten(stored, change))
    with pytest.raises(ValueError, match=r"a\.plan: ") as refused:
        Plan.load(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000 + len(str(path))


@pytest.mark.parametrize("name", ["missing.plan", "", "missing/a.plan"])
def test_a_path_that_can_t_be_read_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=str(tmp_path / name)):
        Plan.load(tmp_path / name)


@pytest.mark.parametrize("data", [None, "hsap-plan-1\n", 3, b"", MAGIC])
def test_what_is_no_stored_plan(data):
    with pytest.raises(ValueError, match="stored plan"):
        Plan.from_bytes(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, [1], (), {}, b"x", 1j, np.int64(1), np.zeros(2)])
def test_option_values_that_no_plan_can_keep(problem, value):
    with pytest.raises(ValueError, match="planner sap: slack is"):
        compile(problem, slack=value)


@pytest.mark.parametrize("value", [True, "0.1", -0.1, 10**400])
def test_slack_is_a_number(problem, value):
    with pytest.raises(ValueError, match="slack"):
        compile(problem, slack=value)


@pytest.mark.parametrize("planner", [None, 3, ["sap"], "nobody", ""])
def test_planners_that_don_t_exist(problem, planner):
    with pytest.raises(ValueError, match="known planners are"):
        compile(problem, planner)


@pytest.mark.parametrize("what", [None, 3, "sap", (7, 5), Layout.from_lengths([7])])
def test_what_is_no_problem(what):
    with pytest.raises(ValueError, match="of type"):
        compile(what)
