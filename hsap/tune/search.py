"""Search: every legal way of running a job, priced by the stage model; the best few priced again by the event clock.

Shapes go by a bound that no planner can beat: attention divided evenly, nothing exposed. They are tried from the lowest
bound up until the next one's bound is above the worst of the best found, so that nothing better is missed. Of a step's
micro-batches those with the most, the least and the middle attention are planned; the others lie between them by their
area.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hsap.api import compile, simulate
from hsap.data.packing import Pack
from hsap.ir.check import MAX_RANKS, Refused, one_of
from hsap.ir.effects import FLOPS_PER_PAIR
from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.problem import Topology
from hsap.ir.program import Op
from hsap.planners import PLANNERS, run
from hsap.tune.choices import CHECKPOINTING, ZERO_STAGES, Refusals, Shape, shapes, too_large
from hsap.tune.job import Job
from hsap.tune.memory import kept_copies, rank_bytes
from hsap.tune.setting import Setting, reserve_bytes
from hsap.tune.stages import Priced, price
from hsap.tune.step import MicroStep, step_s

DEFAULT_PLANNERS = ("sap", "nested", "flashcp", "magi", "allgather", "mesh", "loongtrain")
"""Tried where none is named: those that are fast to plan and often fast to run."""
REPRICED = 3
MAX_PIECES = 1 << 18
"""Zigzag's kin cut every document in as many chunks as there are ranks, twice: more pieces than this are seconds'."""
MAX_SEARCH = 100_000
"""InterSP ranks times documents above which nested searches for many seconds."""
ARENA_ROOM, LEAST_ARENA = 1.5, 12.0
"""Arena beyond what the priced micro-batches need, and its least multiple: others of the run may need far more."""
_CUTTING, _SEARCHING = ("loongtrain", "mesh"), ("nested",)


@dataclass(frozen=True, slots=True)
class Row:
    """One way of running the job, priced.

    step_s, tokens_per_s of the whole job; tflops a rank. memory: bytes of the fullest rank by item. clock: priced by
    the event clock. others: what the next best planner of this shape takes, (name, seconds), None without one.
    """

    setting: Setting
    step_s: float
    tokens_per_s: float
    tflops: float
    attention_s: float
    memory: dict[str, float]
    arena_multiple: float
    clock: bool = False
    others: tuple[str, float] | None = None

    @property
    def needs_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a search: rows from fast to slow, what fell out and why, and how many shapes were bounded away."""

    job: Job
    rows: list[Row]
    refusals: Refusals
    bounded: int


@dataclass(slots=True)
class _Sampled:
    """Micro-batches of a shape that were planned by one planner, by their area.

    table: a row each, of forward and backward seconds of a layer and the fullest rank's share of the tokens.
    arena_bytes, tokens: the most of any rank.
    """

    areas: list[float] = field(default_factory=list)
    table: list[tuple[float, float, float]] = field(default_factory=list)
    arena_bytes: int = 0
    tokens: int = 0
    factor: tuple[float, float] = (1.0, 1.0)

    def of(self, area: float, tokens: int) -> MicroStep:
        """Predict a micro-batch: by area between those that were planned, in proportion beyond."""
        order = np.argsort(self.areas, kind="stable")
        known, table = np.array(self.areas)[order], np.array(self.table)[order]
        *seconds, share = (float(np.interp(area, known, column)) for column in table.T)
        if len(known) == 1 and known[0]:
            seconds = [each * area / float(known[0]) for each in seconds]
        forward, backward = (each * factor for each, factor in zip(seconds, self.factor))
        return MicroStep((forward, backward), math.ceil(tokens * share))


class Search:
    """A search in progress. planners: names to try, None for `DEFAULT_PLANNERS` where they are quick enough."""

    def __init__(self, job: Job, planners: Sequence[str] | None = None) -> None:
        self.job, self.named = job, planners is not None
        self.planners = tuple(planners) if planners is not None else DEFAULT_PLANNERS
        for name in self.planners:
            one_of("--planners: unknown name", name, PLANNERS, "planners")
        self.refusals = Refusals()
        self.prices: dict[tuple[Topology, str, tuple[Pack, ...]], Priced] = {}
        self.capacity, self.reserve = job.cluster.capacity_bytes, reserve_bytes(job.cluster)

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

    def _settings(self, shape: Shape, planner: str) -> list[Setting]:
        accumulation = self.job.packs_per_step // (shape.dp * shape.micro_packs)
        return [
            Setting(shape.dp, shape.topology, planner, zero, checkpointing, shape.micro_packs, accumulation,
                    self.job.dtype)
            for zero in (ZERO_STAGES if self.job.world > 1 else (0,))
            for checkpointing in CHECKPOINTING
        ]  # fmt: skip

    def _memory(self, setting: Setting, tokens: int, arena: float) -> dict[str, float]:
        copies = kept_copies(self.job.model, setting)
        return rank_bytes(self.job.model, setting, tokens, arena, self.reserve, copies)

    def _arena_unit(self, topology: Topology, micro_packs: int = 1) -> int:
        """Bytes of a rank's arena at a multiple of 1."""
        model = self.job.model
        return -(-self.job.seq_len * micro_packs // topology.num_ranks) * model.q_dim * DTYPE_BYTES[self.job.dtype]

    def _bound(self, shape: Shape) -> float | None:
        """Seconds that no planner can beat; None, and why, where nothing fits even with everything even."""
        job, cluster, ranks = self.job, self.job.cluster, shape.topology.num_ranks
        most = -(-min(job.seq_len * shape.micro_packs, job.tokens) // ranks)
        arena = LEAST_ARENA * self._arena_unit(shape.topology, shape.micro_packs)
        items = {s: self._memory(s, most, arena) for s in self._settings(shape, "any")}
        fitting = [s for s, each in items.items() if sum(each.values()) <= self.capacity]
        if not fitting:
            least = min(items, key=lambda s: sum(items[s].values()))
            self._refuse(shape, f"at best (ZeRO {least.zero_stage}, checkpointing {least.checkpointing})", items[least])
            return None
        per_pair = job.model.num_q_heads * job.model.head_dim / ranks / cluster.flops_per_s
        ideal = (
            FLOPS_PER_PAIR[Op.ATTEND] * per_pair / cluster.attend_efficiency,
            FLOPS_PER_PAIR[Op.ATTEND_GRAD] * per_pair / cluster.attend_grad_efficiency,
        )
        groups = [
            [MicroStep((area * ideal[0], area * ideal[1]), -(-tokens // ranks)) for area, tokens in group]
            for group in self._sizes(shape)
        ]
        return min(step_s(job.model, s, cluster, groups) for s in fitting)

    def _sizes(self, shape: Shape) -> list[list[tuple[float, int]]]:
        """Area and tokens of every micro-batch of every SP group."""
        job = self.job
        return [
            [
                (sum(job.areas[pack] for pack in micro), sum(p.num_tokens for pack in micro for p in pack))
                for micro in group
            ]
            for group in job.dealt(shape.dp, shape.micro_packs)
        ]

    def _refuse(self, shape: Shape, which: str, items: dict[str, float]) -> None:
        """Note what doesn't fit; with several packs at once it says nothing of the shape."""
        if shape.micro_packs == 1:
            self.refusals.add(str(shape), f"{which} {too_large(items, self.capacity)}", sum(items.values()))

    def _fitting(self, shape: Shape) -> list[Row]:
        """Every planner of a shape that fits, each with its fastest ZeRO stage and checkpointing."""
        found, misfits = [], []
        for planner in self._planners(shape):
            if (priced := self._price(shape, planner)) is None:
                continue
            row = self._row(shape, planner, priced)
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
            return ["sap" if "sap" in self.planners else self.planners[0]]
        if self.named:
            return list(self.planners)
        documents = max(sum(map(len, micro)) for group in self.job.dealt(shape.dp, shape.micro_packs)
                        for micro in group)  # fmt: skip
        out = []
        for name in self.planners:
            if name in _CUTTING and documents * inter * (2 * inter + 1) > MAX_PIECES:
                self.refusals.add(f"planner {name}", _LEFT_OUT.format("cut documents in too many pieces"))
            elif name in _SEARCHING and inter * documents > MAX_SEARCH:
                self.refusals.add(f"planner {name}", _LEFT_OUT.format("search for many seconds"))
            else:
                out.append(name)
        return out

    def _price(self, shape: Shape, planner: str) -> _Sampled | None:
        """Plan and price up to three micro-batches, the one with the most attention first."""
        priced = _Sampled()
        for micro, area in self._samples(shape):
            problem, key = self.job.problem(micro, shape.topology), (shape.topology, planner, micro)
            try:
                if key not in self.prices:
                    self.prices[key] = price(problem, run(planner, problem, {}))
            except Refused as error:
                self.refusals.add(f"planner {planner}", str(error))
                return None
            found = self.prices[key]
            priced.areas.append(area)
            share = found.tokens / max(problem.layout.num_tokens, 1)
            priced.table.append((found.layer_s(problem, 0), found.layer_s(problem, 1), share))
            priced.arena_bytes = max(priced.arena_bytes, found.arena_bytes)
            priced.tokens = max(priced.tokens, found.tokens)
        return priced

    def _samples(self, shape: Shape) -> list[tuple[tuple[Pack, ...], float]]:
        """Micro-batches with the most, the least and the middle attention, with their areas."""
        micros = [micro for group in self.job.dealt(shape.dp, shape.micro_packs) for micro in group]
        areas = [sum(self.job.areas[pack] for pack in micro) for micro in micros]
        order = sorted(range(len(micros)), key=lambda i: (-areas[i], i))
        chosen = list(dict.fromkeys([order[0], order[-1], order[len(order) // 2]]))
        return [(micros[i], areas[i]) for i in chosen]

    def _row(self, shape: Shape, planner: str, attention: _Sampled, clock: bool = False) -> Row | dict[str, float]:
        """The fastest ZeRO stage and checkpointing that fit; where none does, the memory of that which needs least."""
        job = self.job
        groups = [[attention.of(*micro) for micro in group] for group in self._sizes(shape)]
        most = max(attention.tokens, -(-job.seq_len * shape.micro_packs // shape.topology.num_ranks))
        unit, settings = self._arena_unit(shape.topology, shape.micro_packs), self._settings(shape, planner)
        multiple = max(math.ceil(ARENA_ROOM * attention.arena_bytes / unit * 2) / 2, LEAST_ARENA)
        items = {setting: self._memory(setting, most, multiple * unit) for setting in settings}
        fitting = [setting for setting, each in items.items() if sum(each.values()) <= self.capacity]
        if not fitting:
            return min(items.values(), key=lambda each: sum(each.values()))
        times = {setting: step_s(job.model, setting, job.cluster, groups) for setting in fitting}
        setting = min(times, key=lambda s: (times[s], s.zero_stage))
        seconds = times[setting]
        attended = max(sum(sum(micro.attention_s) for micro in group) for group in groups) * job.model.num_layers
        return Row(setting, seconds, job.tokens / seconds, job.flops / seconds / job.world / 1e12, attended,
                   items[setting], multiple, clock)  # fmt: skip

    def _again(self, rows: list[Row], by_clock: bool) -> Row | None:
        """Give the best row of a shape, priced by the event clock where asked.

        The next one where its plan needs more memory than it seemed; None where all do.
        """
        for row in sorted(rows, key=lambda row: row.step_s):
            setting = row.setting
            shape = Shape(setting.dp, setting.topology, setting.micro_packs)
            priced = self._price(shape, setting.planner)
            if priced is None:
                continue
            if by_clock:
                micro, _ = self._samples(shape)[0]
                plan = compile(self.job.problem(micro, shape.topology), setting.planner)
                timeline = simulate(plan)
                told = timeline.seconds("forward"), timeline.seconds("backward")
                priced.factor = tuple(a / b if b else 1.0 for a, b in zip(told, priced.table[0]))
                priced.arena_bytes = max(int(plan.arena_bytes().max()), priced.arena_bytes)
            again = self._row(shape, setting.planner, priced, by_clock)
            if isinstance(again, Row):
                others = [o for o in rows if o.setting.planner != setting.planner]
                second = min(others, key=lambda o: o.step_s, default=None)
                return replace(again, others=second and (second.setting.planner, second.step_s))
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
            f"{self.refusals.reasons[closest][0]}, which {closest}. By memory alone {self._would_fit()}"
        )

    def _would_fit(self) -> str:
        """Say at how many nodes, and at how long packs, one SP group of all ranks would fit; by doubling."""
        job = self.job

        def fits(nodes: int, tokens: int) -> bool:
            world = nodes * job.cluster.ranks_per_node
            setting = Setting(1, Topology(world, 1), "any", 3 if world > 1 else 0, "full", 1, 1, job.dtype)
            most = -(-tokens // world)
            arena = LEAST_ARENA * most * job.model.q_dim * setting.element_bytes
            return sum(self._memory(setting, most, arena).values()) <= self.capacity

        # As it was asked it does not fit, whatever this estimate says.
        nodes, tokens = 2 * job.cluster.num_nodes, max(job.seq_len // 2, 1)
        while not fits(nodes, job.seq_len) and 2 * nodes * job.cluster.ranks_per_node <= MAX_RANKS:
            nodes *= 2
        while not fits(job.cluster.num_nodes, tokens) and tokens > 1:
            tokens //= 2
        ways = [f"--nodes {nodes} would do"] if fits(nodes, job.seq_len) else []
        ways += [f"--seq-len {tokens} would do"] if fits(job.cluster.num_nodes, tokens) else []
        return ", or ".join(ways) or "neither more nodes nor shorter packs would do: it takes a cluster with more of it"


_LEFT_OUT = "would {} at the widest topologies, so it was left out there; name it with --planners to have it tried"


def tune(job: Job, planners: Sequence[str] | None = None, top: int = 10) -> Found:
    """Rank the ways of running a job by predicted tokens/s.

    planners: names to try (None: `DEFAULT_PLANNERS`). top: rows to keep. Deterministic. ValueError: an unknown planner,
    and where nothing that is legal fits, with what would.
    """
    return Search(job, planners).run(top)
