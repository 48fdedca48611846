"""Chain fuzzing: batches at random through all of planning and the reference runtime, against float64 attention.

    python -m tests.bench.chainfuzz --minutes 30

A case is documents, masks, heads, format, topology, cluster, planner and options, all drawn at random. Its plan must
verify, come back the same from its text and from its bytes, and give o, lse, dq, dk and dv right on memory full of NaN;
what can't be planned must be refused in one paragraph. Hypothesis draws the cases and makes one that fails as small as
it can be; it is printed as a test. The same seed gives the same cases.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hsap.api import compile
from hsap.ir.check import Refused
from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.reader import parse
from hsap.planners import AUTO, PLANNERS
from hsap.verify import verify
from tests.mutation.truth import untrue


@dataclass(frozen=True)
class Case:
    """One batch and how it is planned. masks: for each (mask, layers), a mask a spelling, one for each document, or
    rectangles (first row, last row, first key, last key, lo, hi) in hundredths of each document."""

    lengths: tuple[int, ...]
    masks: tuple
    heads: tuple[int, int, int]
    dtype: str
    wire_dtype: str | None
    topology: str
    planner: str
    options: dict
    ranks_per_node: int = 8
    first_rank: int = 0
    packs: int = 0
    limited: bool = False

    def problem(self) -> Problem:
        layout = Layout(self.lengths, (self.packs, len(self.lengths) - self.packs))
        masks = [(self._mask(mask, layout), layers) for mask, layers in self.masks]
        cluster = Cluster("fuzzed", self.ranks_per_node, self.first_rank)
        shape = HeadShape(*self.heads, self.dtype)
        most = -(-layout.num_tokens // Topology.parse(self.topology).num_ranks) + 3 if self.limited else None
        return Problem(layout, shape, Topology.parse(self.topology), masks, cluster, most, None, self.wire_dtype)

    @staticmethod
    def _mask(mask, layout: Layout):
        if isinstance(mask, str):
            return mask
        if isinstance(mask[0], str):
            return [mask[i % len(mask)] for i in range(layout.num_documents)]
        return Mask.of(lambda n, _: _rectangles(n, mask), layout, name="rectangles")


def _rectangles(n: int, parts: tuple) -> list[tuple[int, ...]]:
    """Place rectangles in a document, each on rows of its own, so that no pair is there twice."""
    out, behind = [], 0
    for q0, q1, k0, k1, lo, hi in parts:
        rows = max(behind, q0 * n // 100), q1 * n // 100
        keys = k0 * n // 100, k1 * n // 100
        if rows[0] < rows[1] and keys[0] < keys[1]:
            out.append((*rows, *keys, lo * n // 100, hi * n // 100))
            behind = rows[1]
    return out


SMALL = st.integers(1, 9)
SPELLING = st.one_of(
    st.sampled_from(["causal", "full"]),
    st.builds("window:{}".format, st.integers(1, 40)),
    st.builds("lambda:{},{}".format, st.integers(0, 9), st.integers(1, 20)),
    st.builds("blockwise:{},{},{},{}".format, SMALL, st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)),
    st.integers(1, 5).flatmap(lambda n: st.builds(f"shared_question:{n},{{}}".format, st.integers(1, 100 // n))),
    st.builds("prefix:{}".format, st.integers(1, 30)),
    st.builds("chunked:{}".format, st.integers(1, 30)),
)
PART = st.integers(0, 100)
BAND = st.tuples(st.integers(-100, 60), st.integers(0, 60)).map(lambda b: (b[0], min(b[0] + b[1], 100)))
RECTANGLE = st.builds(lambda a, b, c: (*sorted(a), *sorted(b), *c), st.tuples(PART, PART), st.tuples(PART, PART), BAND)
MASK = st.one_of(
    SPELLING,
    st.lists(SPELLING, min_size=1, max_size=3).map(tuple),
    st.lists(RECTANGLE, min_size=1, max_size=4).map(lambda rows: tuple(sorted(rows))),
)
LENGTHS = st.one_of(
    st.lists(st.integers(1, 24), max_size=8),
    st.lists(st.just(1), min_size=1, max_size=20),
    st.lists(st.sampled_from([1, 2, 70]), min_size=1, max_size=4),
    st.lists(st.integers(60, 150), min_size=1, max_size=1),
    st.lists(st.integers(1, 3), max_size=3),
)
HEADS = st.builds(lambda kv, group, dim: (kv * group, kv, dim), st.integers(1, 6), st.integers(1, 4),
                  st.sampled_from([1, 2, 3, 8]))  # fmt: skip
TOPOLOGY = st.tuples(st.integers(1, 9), st.integers(1, 4)).filter(lambda t: t[0] * t[1] <= 16)
FORMAT = st.sampled_from(["fp64", "fp64", "fp32", "bf16", "fp16"])
SLACK = st.sampled_from([0.0, 0.05, 0.5])
OPTIONS = {
    "allgather": {"chunks": st.sampled_from(["pack", "document"])},
    "flashcp": {"slack": SLACK},
    "magi": {"chunks": st.integers(1, 9), "stages": st.integers(1, 4)},
    "mesh": {"a": st.none() | st.integers(1, 4), "slack": SLACK},
    "nested": {"area_slack": SLACK, "token_slack": SLACK, "effort": st.integers(1, 60)},
    "sap": {"balance": st.sampled_from(["area", "blocks"]), "slack": SLACK},
    "dcp": {"block": st.none() | st.integers(4, 40), "divisions": st.integers(1, 6), "area_slack": SLACK},
    "usp": {"heads": st.none() | st.integers(1, 4)},
    "te": {"heads": st.none() | st.integers(1, 4)},
    "loongtrain": {"heads": st.none() | st.integers(1, 4)},
    AUTO: {"candidates": st.lists(st.sampled_from(sorted(PLANNERS)), min_size=1, max_size=4).map("|".join)},
}


@st.composite
def cases(draw) -> Case:
    """Draw a case."""
    planner = draw(st.sampled_from([*PLANNERS, AUTO]))
    options = draw(st.fixed_dictionaries({}, optional=OPTIONS.get(planner, {})))
    if planner in PLANNERS and PLANNERS[planner].may_relay and draw(st.booleans()):
        options["relay"] = True
    lengths = tuple(draw(LENGTHS))
    masks = tuple(zip(draw(st.lists(MASK, min_size=1, max_size=2)), (1, 3)))
    dtype, inter, intra = draw(FORMAT), *draw(TOPOLOGY)
    node = draw(st.integers(1, 8))
    return Case(
        lengths, masks, draw(HEADS), dtype, draw(st.none() | st.sampled_from(["fp32", "bf16", dtype])),
        f"{inter}x{intra}", planner, options, node, draw(st.integers(0, node - 1)), draw(st.integers(0, len(lengths))),
        draw(st.integers(0, 3)) == 0,
    )  # fmt: skip


def chain(case: Case, count: Counter | None = None) -> None:
    """Follow a case from its lengths to its gradients; AssertionError where anything is wrong."""
    count = Counter() if count is None else count
    try:
        problem = case.problem()
        plan = compile(problem, case.planner, **case.options)
    except Refused as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 1000, str(error)
        count["refused"] += 1
        return
    report = verify(plan)
    assert report.ok, str(report)
    assert compile(problem, case.planner, **case.options).hash == plan.hash
    assert parse(plan.text()).to_bytes() == plan.to_bytes() == Plan.from_bytes(plan.to_bytes()).to_bytes()
    why = untrue(plan)
    assert why is None, why
    count[case.planner] += 1
    count[f"{case.dtype}"] += 1
    count["cases"] += 1


def main(arguments: list[str] | None = None) -> int:
    """Follow cases until the time is up; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=200, help="cases of one seed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, count, failures = time.monotonic(), Counter(), []
    for number in range(options.seed, 1 << 40):
        if time.monotonic() - start > 60 * options.minutes:
            break
        failure = run(number, options.batch, count)
        if failure is not None:
            failures.append((number, *failure))
            print(f"seed {number}:\n\ndef test_case():\n    chain({failure[0]!r})\n\n{failure[1]}", flush=True)
        print(f"seed {number}: {dict(count)}, {len(failures)} failed, {time.monotonic() - start:.0f} s", flush=True)
    return int(bool(failures))


def run(number: int, examples: int, count: Counter) -> tuple[Case, str] | None:
    """Follow the cases of one seed: the smallest that fails and why, or None."""
    last: list[Case] = []

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
              phases=[Phase.generate, Phase.shrink], print_blob=False)  # fmt: skip
    @given(cases())
    def follow(case: Case) -> None:
        last[:] = [case]
        chain(case, count)

    try:
        follow()
    except Exception as error:
        return last[0], f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
