"""Loader: tokens a second of packing, batching and planning, alone, beside what training takes; and how it waits.

Run by `make bench-loader`. Per stage, for one core and one data-parallel rank: *pack* makes steps of packs, *batch*
gathers tokens, labels and positions, *plan* compiles, verifies, stores and publishes; *all* is the three as they run
together ahead of training, planning in `--workers` processes. On the demo corpus as train.py packs it, and on packs of
131,072 tokens of FineWeb's document lengths. *Training* is train.py on eight ranks with the demo's settings, after its
first steps; waits are its own `plan_wait_s` and `data_wait_s` over `step_s`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import hsap
from hsap.cli import datasets
from hsap.data import sources
from hsap.data.batch import build_micro_batch
from hsap.data.loader import StepLoader
from hsap.data.packing import Packing, PackStream, StepPacks
from hsap.data.store import DocumentStore
from hsap.data.tokenise import tokenise_documents
from hsap.data.tokenizer import load_tokenizer
from hsap.planning.compiling import PlanningSetup, Shape
from hsap.planning.exchange import PlanExchange
from hsap.planning.pool import PlanPool
from hsap.planning.steps import PlannedSteps
from tests.bench.record import RESULTS, caption, conditions, record
from tests.parity import REPOSITORY, run_world

PLANNERS = ("sap", "nested", "auto")
TOPOLOGY = "4x2"
DEMO = REPOSITORY / "datasets/demo"
LONG_DATASET = "prolong-FineWeb(2023-50)"
HEADS = {"demo": hsap.HeadShape(8, 4, 16, "fp32"), "long": hsap.HeadShape(9, 3, 64, "bf16")}
"""Those of models `tiny` and `smollm2-135m`."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A corpus, and how it is packed."""

    name: str
    store: DocumentStore
    packing: Packing

    def setup(self, planner: str) -> PlanningSetup:
        """How its micro-batches are planned."""
        problem = hsap.Problem(
            hsap.Layout.from_lengths([]),
            HEADS[self.name],
            hsap.Topology.parse(TOPOLOGY),
            arena_multiple=24.0,
            wire_dtype="fp32",
        )
        return PlanningSetup(problem, planner, {}, True)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. packs: of each stage. warm_steps, steps: of training."""

    packs: int = 60
    warm_steps: int = 5
    steps: int = 20


QUICK = Size(3, 1, 2)


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Print stages and training, and keep the figures."""
    parser = argparse.ArgumentParser("tests.bench.loader", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few packs and steps")
    parser.add_argument("--workers", type=int, default=2, help="planning processes (default 2)")
    parser.add_argument("--planner", nargs="+", default=PLANNERS, help=f"default {' '.join(PLANNERS)}")
    asked = parser.parse_args(argv)
    size, found = QUICK if asked.quick else Size(), conditions()
    print(f"loader: {caption(found, topology=TOPOLOGY, workers=asked.workers)}")
    trained = training(asked.planner, size)
    needs = {line["planner"]: line["tokens_per_s"] for line in trained}
    print("\nthousand tokens/s, over what training the demo takes:")
    print(f"{'stream':6} {'planner':8} {'pack':>10} {'batch':>10} {'plan':>10} {'all':>10} {'× training':>11}")
    rows = [alone(made, planner, size, asked.workers, needs) for made in streams() for planner in asked.planner]
    figures = {"quick": asked.quick, "workers": asked.workers, "training": trained, "alone": rows}
    record("loader", figures, found, folder)


def streams() -> list[Stream]:
    """The demo's corpus, and made-up tokens in long packs of real lengths."""
    documents = sources.open(str(DEMO / "train.jsonl.gz"))
    demo = tokenise_documents(documents, load_tokenizer(str(DEMO / "tokenizer.json")))
    rng = np.random.default_rng(1)
    lengths = datasets.documents(LONG_DATASET, 20_000, rng)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    long = DocumentStore(rng.integers(0, 2048, starts[-1], np.int32), starts, tuple(map(str, range(len(lengths)))))
    return [Stream("demo", demo, Packing(2048)), Stream("long", long, Packing(131072))]


def alone(made: Stream, planner: str, size: Size, workers: int, needs: dict[str, float]) -> dict:
    """Tokens a second of each stage by itself, and of all together."""
    _epoch(made)  # what loading the code takes is paid once
    steps, pack_s = _timed(lambda: _epoch(made))
    some = steps[: size.packs]
    batches, batch_s = _timed(lambda: [build_micro_batch(made.store, step.packs, step.pack_tokens) for step in some])
    tokens = sum(len(batch.tokens) for batch in batches)
    setup = made.setup(planner)
    setup.outcome(Shape((5, 3), (2,)))  # likewise
    _, plan_s = _timed(lambda: [setup.outcome(Shape.of(batch)) for batch in batches])
    whole = _together(made, setup, size, workers)
    rates = {"pack": len(made.store.tokens) / pack_s, "batch": tokens / batch_s, "plan": tokens / plan_s, "all": whole}
    line = {"stream": made.name, "planner": planner, "pack_tokens": made.packing.pack_tokens, "packs": len(batches)}
    line |= rates | {"over": whole / needs[planner]}
    cells = "".join(f" {line[stage] / 1000:>10,.1f}" for stage in rates)
    print(f"{made.name:6} {planner:8}{cells} {line['over']:>10.1f}×", flush=True)
    return line


def _epoch(made: Stream) -> list[StepPacks]:
    """Give an epoch's steps of one pack, one after the other."""
    stream = PackStream(made.store.lengths, made.packing, 1)
    return list(itertools.takewhile(lambda step: step.epoch == 0, stream))


def _timed(work: Callable[[], list]) -> tuple[list, float]:
    begin = time.perf_counter()
    return work(), time.perf_counter() - begin


def _together(made: Stream, setup: PlanningSetup, size: Size, workers: int) -> float:
    """Tokens a second of planned steps as a rank would take them that computes nothing and plans for all."""
    with PlanPool(setup, workers) as pool, StepLoader(made.store, made.packing, packs_per_step=1, seed=1) as loader:
        for warm in [pool.submit(Shape((5, 3 + i), (2,))) for i in range(workers)]:
            warm.result()
        exchange = _Whole(None, "bench", 0, setup.problem.num_ranks, setup, pool)
        steps = PlannedSteps(itertools.islice(loader, size.packs), exchange, lookahead=2 * workers)
        begin = time.perf_counter()
        tokens = sum(step.batch.num_tokens for step in steps)
        seconds = time.perf_counter() - begin
        steps.close()
    return tokens / seconds


class _Whole(PlanExchange):
    """The exchange of a rank whose turn it always is."""

    def _planner_of(self, number: int) -> int:
        return self.rank


def training(planners: Sequence[str], size: Size) -> list[dict]:
    """Train the demo with each planner, in one world of ranks: what it takes, and how long it waits."""
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as folder:
        outs = {planner: Path(folder) / planner for planner in planners}
        run_world(8, [_arguments(planner, size, out) for planner, out in outs.items()], Path(folder))
        return [_waits(planner, size, out) for planner, out in outs.items()]


def _arguments(planner: str, size: Size, out: Path) -> list[str]:
    """What train.py is told: the demo as it is."""
    settings = {
        "+topology": TOPOLOGY,
        "data.path": DEMO / "train.jsonl.gz",
        "data.tokenizer": DEMO / "tokenizer.json",
        "planner": planner,
        "data.eval_path": "null",
        "train.steps": size.warm_steps + size.steps,
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "out": out,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _waits(planner: str, size: Size, out: Path) -> dict:
    """Figures of the steps after the first."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines][size.warm_steps :]
    seconds = sum(step["step_s"] for step in steps)
    line = {"planner": planner, "steps": len(steps), "tokens_per_s": sum(step["tokens"] for step in steps) / seconds}
    line["step_s"] = seconds / len(steps)
    line |= {f"{what}_wait": sum(step[f"{what}_wait_s"] for step in steps) / seconds for what in ("plan", "data")}
    told = "training with {planner}: {tokens_per_s:,.0f} tokens/s, {step_s:.2f} s a step; of it waits for plans "
    print((told + "{plan_wait:.2%}, for data {data_wait:.2%}").format(**line), flush=True)
    return line


if __name__ == "__main__":
    main()
