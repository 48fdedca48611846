"""Plans that the viewer's tests look at, and the files of a run that never ran."""

import json

import numpy as np

import hsap
from hsap.ir.schedule import DIRECTIONS

README = [340, 200, 100, 30, 30, 100]


def compiled(lengths=README, topology="8x1", planner="sap", masks="causal", cluster=None, **options) -> hsap.Plan:
    heads = hsap.HeadShape(8, 2, 16, "bf16")
    masks = [(mask, 1) for mask in masks.split("+")]
    cluster = cluster or hsap.Cluster()
    problem = hsap.Problem(hsap.Layout.from_lengths(lengths), heads, hsap.Topology.parse(topology), masks, cluster)
    return hsap.compile(problem, planner, **options)


def write_run(folder, plan, *, step=3, layer=0, factor=2.0, origin_s=1000.0, host=lambda rank: "a", messages=True):
    """Write a run's files as training would: the simulator's times, `factor` times as long."""
    plan.save(folder / f"plan-{plan.hash[:16]}.plan")
    timeline = hsap.simulate(plan)
    for rank in range(plan.num_ranks):
        with (folder / f"timeline-rank{rank}.jsonl").open("a") as file:
            for mask, pair in enumerate(timeline.traces):
                for direction, trace in zip(DIRECTIONS, pair):
                    mine = slice(*trace.programs.offsets[rank : rank + 2].tolist())
                    times = {
                        f"{name}_s": [None if np.isnan(t) else origin_s + factor * t for t in column[mine].tolist()]
                        for name in ("start", "end", "comm_start", "comm_end")
                        if messages or not name.startswith("comm")
                        for column in [getattr(trace.times, name)]
                    }
                    line = {"plan": plan.hash, "rank": rank, "step": step, "layer": layer, "mask": mask}
                    line |= {"direction": direction, "host": host(rank)}
                    file.write(json.dumps(line | times) + "\n")
    return timeline
