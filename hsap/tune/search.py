"""Search: every legal way of running a job, priced by the stage model; the best few priced again by the event clock.

Shapes go by a bound that no planner can beat: attention divided evenly, nothing exposed. They are tried from the lowest
bound up until the next one's bound is above the worst of the best found, so that nothing better is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hsap.ir.check import Refused
from hsap.ir.effects import FLOPS_PER_PAIR
from hsap.ir.program import Op
from hsap.planners import DEFAULT, PLANNERS, usual
from hsap.tune.attention import Attention, Sampled
from hsap.tune.choices import Refusals, Shape, shapes, too_large
from hsap.tune.found import Found, Row
from hsap.tune.job import Job
from hsap.tune.room import Room
from hsap.tune.step import MicroSteps, step_s

REPRICED = 3


def tune(job: Job, planners: Sequence[str] | None = None, top: int = 10) -> Found:
    """Rank the ways of running a job by predicted tokens/s.

    planners: names to try (None: the usual ones, where they are quick enough). top: rows to keep. Deterministic.
    ValueError: an unknown planner, and where nothing that is legal fits, with what would.
    """
    return Search(job, planners).run(top)


class Search:
    """A search in progress. planners: as `tune` has them."""

    def __init__(self, job: Job, planners: Sequence[str] | None = None) -> None:
        self.job, self.named, self.planners = job, planners is not None, usual(planners)
        self.refusals, self.room, self.attention = Refusals(), Room(job), Attention(job)

    def run(self, top: int = 10) -> Found:
        """Rank the best `top` shapes. ValueError where nothing that is legal fits."""
        bounded = sorted(
            ((bound, i, shape) for i, shape in enumerate(shapes(self.job, self.refusals))
             if (bound := self._bound(shape)) is not None), key=lambda item: item[:2]
        )  # fmt: skip
        rows: dict[str, list[Row]] = {}
        skipped = 0
        for bound, _, shape in bounded:
            best = sorted(min(row.step_s for row in each) for each in rows.values())
            if len(best) >= top and bound >= best[top - 1]:
                skipped += 1
            elif found := self._fitting(shape):
                rows.setdefault(str(shape), []).extend(found)
        kept: list[Row] = []
        for each in sorted(rows.values(), key=lambda each: min(row.step_s for row in each)):
            if len(kept) < top and (row := self._again(each, len(kept) < REPRICED)):
                kept.append(row)
        if not kept:
            raise Refused(self._nothing())
        return Found(self.job, sorted(kept, key=lambda row: row.step_s), self.refusals, skipped)

    def _bound(self, shape: Shape) -> float | None:
        """Seconds that no planner can beat; None, and why, where nothing fits even with everything even."""
        job, cluster, ranks = self.job, self.job.cluster, shape.topology.num_ranks
        items = self.room.at_best(shape)
        fitting = self.room.holding(items)
        if not fitting:
            least = min(items, key=lambda s: sum(items[s].values()))
            self._refuse(shape, f"at best (ZeRO {least.zero_stage}, checkpointing {least.checkpointing})", items[least])
            return None
        per_pair = job.model.num_q_heads * job.model.head_dim / ranks / cluster.flops_per_s
        ideal = (
            FLOPS_PER_PAIR[Op.ATTEND] * per_pair / cluster.attend_efficiency,
            FLOPS_PER_PAIR[Op.ATTEND_GRAD] * per_pair / cluster.attend_grad_efficiency,
        )
        areas, tokens = self.attention.sizes(shape)
        micro = MicroSteps((areas * ideal[0], areas * ideal[1]), -(-tokens // ranks))
        return min(step_s(job.model, s, cluster, micro) for s in fitting)

    def _refuse(self, shape: Shape, which: str, items: dict[str, float]) -> None:
        """Note what doesn't fit; with several packs at once it says nothing of the shape."""
        if shape.micro_packs == 1:
            self.refusals.add(str(shape), f"{which} {too_large(items, self.room.capacity)}", sum(items.values()))

    def _fitting(self, shape: Shape) -> list[Row]:
        """Every planner of a shape that fits, each with its fastest ZeRO stage and checkpointing."""
        found, misfits = [], []
        for planner in self._planners(shape):
            if (sampled := self._sampled(shape, planner)) is None:
                continue
            row = self._row(shape, planner, sampled)
            if isinstance(row, Row):
                found.append(row)
            else:
                misfits.append((sum(row.values()), planner, row))
        if misfits and not found:
            _, planner, items = min(misfits, key=lambda misfit: misfit[:2])
            self._refuse(shape, f"with the planner that needs least, {planner},", items)
        return found

    def _planners(self, shape: Shape) -> list[str]:
        """Planners worth a try; where a column is one rank, all place the same blocks on it."""
        inter = shape.topology.inter_sp
        if inter == 1:
            columns = [name for name in self.planners if not PLANNERS[name].whole_group] or self.planners
            return [DEFAULT if DEFAULT in columns else columns[0]]
        if self.named:
            return list(self.planners)
        documents, out = self.attention.documents(shape), []
        for name in self.planners:
            if PLANNERS[name].effort(documents, inter) > 1:
                self.refusals.add(
                    f"planner {name}",
                    "would take seconds or longer to plan the widest topologies, so it was left out there; name it "
                    "among the planners to have it tried",
                )
            else:
                out.append(name)
        return out

    def _sampled(self, shape: Shape, planner: str, by_clock: bool = False) -> Sampled | None:
        """Price a planner's attention; None, and why, where it refuses."""
        try:
            return (self.attention.clocked if by_clock else self.attention.sampled)(shape, planner)
        except Refused as error:
            self.refusals.add(f"planner {planner}", str(error))
            return None

    def _row(self, shape: Shape, planner: str, sampled: Sampled, clock: bool = False) -> Row | dict[str, float]:
        """The fastest ZeRO stage and checkpointing that fit; where none does, the memory of that which needs least."""
        job = self.job
        micro = sampled.of(*self.attention.sizes(shape))
        items, multiple = self.room.planned(shape, planner, sampled.tokens, sampled.arena_bytes)
        fitting = self.room.holding(items)
        if not fitting:
            return min(items.values(), key=lambda each: sum(each.values()))
        times = {setting: step_s(job.model, setting, job.cluster, micro) for setting in fitting}
        setting = min(times, key=lambda s: (times[s], s.zero_stage))
        seconds = times[setting]
        attended = float(np.add(*micro.attention_s).sum(axis=1).max()) * job.model.num_layers
        return Row(setting, seconds, job.tokens / seconds, job.flops / seconds / job.world / 1e12, attended,
                   items[setting], multiple, clock)  # fmt: skip

    def _again(self, rows: list[Row], by_clock: bool) -> Row | None:
        """Give the best row of a shape, priced by the event clock where asked.

        The next one where its plan needs more memory than it seemed; None where all do.
        """
        for row in sorted(rows, key=lambda row: row.step_s):
            setting = row.setting
            shape = Shape(setting.dp, setting.topology, setting.micro_packs)
            if (sampled := self._sampled(shape, setting.planner, by_clock)) is None:
                continue
            again = self._row(shape, setting.planner, sampled, by_clock)
            if isinstance(again, Row):
                others = [o for o in rows if o.setting.planner != setting.planner]
                second = min(others, key=lambda o: o.step_s, default=None)
                return replace(again, others=None if second is None else (second.setting.planner, second.step_s))
            self._refuse(shape, f"with {setting.planner}, compiled,", again)
        return None

    def _nothing(self) -> str:
        """Say that nothing fits, and what would."""
        needed = self.refusals.needed
        closest = min(needed, key=needed.__getitem__, default=None)
        if closest is None:
            return "no legal choice is left: " + "; ".join(self.refusals.lines(3))
        return (
            f"nothing that is legal fits {self.job.world} ranks of {self.job.cluster.name}; the closest is "
            f"{self.refusals.reasons[closest][0]}, which {closest}. By memory alone {self.room.would_hold()}"
        )
