"""How far the stage model is from the event clock: `python -m tests.bench.stagemodel [--planner sap …] [--all]`.

Each planner on packs of four kinds and topologies of up to 64 ranks on several clusters; the error of forward and of
backward of every plan is one figure. Nothing in the model is fitted to any of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from hsap import clusters
from hsap.api import simulate
from hsap.cli.datasets import draw
from hsap.compiler.pipeline import build
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import DIRECTIONS
from hsap.planners import candidates, run
from hsap.tune.stages import price

PLANNERS = candidates()
PACKS = (("ldc", 1 << 17, 1), ("ldc", 1 << 17, 2), ("fineweb", 1 << 17, 0), ("single", 1 << 16, 0), ("ldc", 1 << 19, 0))
SHAPES = (
    ("8x1", "dgx-a100"),
    ("32x1", "p4de"),
    ("8x8", "dgx-a100"),
    ("16x4", "dgx-h100"),
    ("16x2", "p4de"),
    ("4x2", "cpu-gloo"),
)
HEADS = (HeadShape(32, 32, 128, "bf16"), HeadShape(8, 2, 128, "bf16"))
MASKS = ("causal", "window:4096")


def cases(
    planners: Sequence[str], packs=PACKS, shapes=SHAPES, heads=HEADS, masks=MASKS
) -> Iterator[tuple[str, str, Problem]]:
    """Planner, name and problem of each case; heads and masks take turns."""
    turn = 0
    for dataset, tokens, seed in packs:
        layout = Layout.from_lengths(draw(dataset, tokens, seed))
        for shape, cluster in shapes:
            turn += 1
            problem = Problem(
                layout, heads[turn % len(heads)], Topology.parse(shape), ((masks[turn % 3 == 0], 1),),
                clusters.read(cluster), wire_dtype="fp32",
            )  # fmt: skip
            for planner in planners:
                yield planner, f"{dataset}@{tokens} {shape} {cluster} {masks[turn % 3 == 0]}", problem


def errors(planner: str, problem: Problem) -> list[float]:
    """Stage model over event clock, less 1: forward, backward and arena."""
    strategy = run(planner, problem, {})
    plan = build(problem, strategy, planner, {})
    told, timeline = price(problem, strategy), simulate(plan)
    pairs = [(told.layer_s(problem, d), timeline.seconds(name)) for d, name in enumerate(DIRECTIONS)]
    return [a / b - 1 for a, b in [*pairs, (told.arena_bytes, int(plan.arena_bytes().max()))]]


def distribution(found: np.ndarray) -> str:
    """Median, 95th percentile and worst of absolute errors, as text."""
    size = np.abs(found)
    return f"median {np.median(size):.2%}, 95th percentile {np.quantile(size, 0.95):.2%}, worst {size.max():.2%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line a planner, then all together."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--planner", nargs="+", default=PLANNERS)
    parser.add_argument("--packs", type=int, default=len(PACKS), help="how many of the packs")
    parser.add_argument("--all", action="store_true", help="a line a case, too")
    arguments = parser.parse_args(argv)
    found: dict[str, list[list[float]]] = {}
    for planner, name, problem in cases(arguments.planner, PACKS[: arguments.packs]):
        found.setdefault(planner, []).append(errors(planner, problem))
        if arguments.all:
            print(f"{planner} {name}: " + ", ".join(f"{error:+.2%}" for error in found[planner][-1]), flush=True)
    for planner, rows in found.items():
        table = np.array(rows)
        print(f"{planner:<10} time {distribution(table[:, :2])}; arena {distribution(table[:, 2])}")
    table = np.array([row for rows in found.values() for row in rows])
    print(f"{'all':<10} time {distribution(table[:, :2])}; arena {distribution(table[:, 2])}; plans: {len(table)}")


if __name__ == "__main__":
    main()
