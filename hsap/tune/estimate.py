"""Estimate: the longest pack that a model's ranks hold, for every way of running it on a cluster.

With everything even: a pack's tokens are shared out equally, and the communication buffer has its least size. Where
document lengths are given, a pack of them is planned, and shortened until what its fullest rank needs fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hsap.ir.check import MAX_TOKENS, Refused
from hsap.ir.problem import Topology
from hsap.tune.attention import Attention
from hsap.tune.choices import CHECKPOINTING, ZERO_STAGES, Refusals, Shape, shapes, too_large
from hsap.tune.job import Job
from hsap.tune.room import LEAST_ARENA, Room
from hsap.tune.setting import Setting

SHORTER = 0.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A setting with the longest pack that it holds, and the bytes by item of its fullest rank then.

    arena_multiple: of the communication buffer among them, as train.py has to be told.
    """

    setting: Setting
    pack_tokens: int
    memory: dict[str, float]
    arena_multiple: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What is left open (None) or fixed of a setting, and the length of pack where that is fixed."""

    topology: Topology | None = None
    zero_stage: int | None = None
    checkpointing: str | None = None
    pack_tokens: int | None = None

    def settings(self, room: Room, shape: Shape, planner: str = "any") -> list[Setting]:
        """The settings of a shape that are asked for."""
        zero = ZERO_STAGES if self.zero_stage is None else (self.zero_stage,)
        how = CHECKPOINTING if self.checkpointing is None else (self.checkpointing,)
        return [s for s in room.settings(shape, planner) if s.zero_stage in zero and s.checkpointing in how]


def estimate(job: Job, asked: Asked, planner: str | None = None) -> list[Estimate]:
    """Give each topology's setting with the longest pack, from long to short.

    job: with as many packs a step as ranks; its seq_len only bounds a group's ranks. planner: plans packs of the job's
    documents; None: everything even. ValueError: a topology that is none of the job's, and where nothing fits, with
    what needs least.
    """
    room = Room(job)
    wanted = [shape for shape in shapes(job, Refusals()) if shape.micro_packs == 1]
    if asked.topology is not None:
        wanted = [shape for shape in wanted if shape.topology == asked.topology]
        if not wanted and asked.topology.num_ranks > job.seq_len:
            raise Refused(f"{asked.topology} has more ranks than a pack of {job.seq_len:,} has tokens")
        if not wanted:
            raise Refused(
                f"{asked.topology} is none of the topologies of {job.world} ranks in nodes of "
                f"{job.cluster.ranks_per_node}: its ranks must divide them, fill whole nodes or an equal part of one, "
                f"and IntraSP stay inside a node and within the {job.model.num_q_heads} query heads"
            )
    found, misfits, refusals = [], [], Refusals()
    for shape in wanted:
        settings = asked.settings(room, shape)
        if not settings:
            continue
        # Of equally long ones the first needs least time: no checkpointing, the lowest stage.
        each = [(_longest(room, setting, asked.pack_tokens), setting) for setting in settings]
        tokens, setting = max(each, key=lambda one: one[0])
        items, multiple = room.even(setting, tokens), LEAST_ARENA
        if not tokens:
            items = min((room.even(s, asked.pack_tokens or 1) for s in settings), key=_needed)
        elif planner is not None:
            try:
                tokens, setting, items, multiple = _planned(job, asked, shape, planner, tokens)
            except Refused as error:
                refusals.add(str(shape), str(error))
                continue
        if tokens and setting is not None:
            found.append(Estimate(setting, tokens, items, multiple))
        else:
            misfits.append((_needed(items), str(shape), items))
    if not found:
        raise Refused(_nothing(job, room, asked, misfits, refusals))
    return sorted(found, key=lambda one: -one.pack_tokens)


def _needed(items: dict[str, float]) -> float:
    return sum(items.values())


def _longest(room: Room, setting: Setting, fixed: int | None) -> int:
    """Tokens of the longest pack that fits, 0 where none does. fixed: only that length is tried."""
    if fixed is not None:
        return fixed if room.holds(room.even(setting, fixed)) else 0
    low, high = 0, MAX_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if room.holds(room.even(setting, middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _planned(
    job: Job, asked: Asked, shape: Shape, planner: str, tokens: int
) -> tuple[int, Setting | None, dict[str, float], float]:
    """Shorten a pack until a plan of the job's documents fits, in one of the settings asked for.

    Gives tokens, setting, bytes by item and the arena's multiple; 0, None and the least that it takes where no length,
    or not the fixed one, fits. ValueError: the planner refuses.
    """
    while True:
        one = replace(job, seq_len=tokens)
        sampled, room = Attention(one).sampled(shape, planner), Room(one)
        memory, multiple = room.planned(shape, planner, sampled.tokens, sampled.arena_bytes)
        settings = asked.settings(room, shape, planner)
        for setting in settings:
            if room.holds(memory[setting]):
                return tokens, setting, memory[setting], multiple
        shorter = 0 if asked.pack_tokens else int(tokens * SHORTER)
        if not shorter:
            return 0, None, min((memory[setting] for setting in settings), key=_needed), multiple
        tokens = shorter


def _nothing(
    job: Job,
    room: Room,
    asked: Asked,
    misfits: Sequence[tuple[float, str, dict[str, float]]],
    refusals: Refusals,
) -> str:
    tokens = asked.pack_tokens or 1
    what = f"{job.name} on {job.cluster.num_nodes} x {job.cluster.name} ({job.world} ranks)"
    if misfits:
        _, shape, items = min(misfits, key=lambda misfit: misfit[:2])
        return (
            f"{what}: a pack of {tokens:,} token{'s' if tokens > 1 else ''} fits nowhere that was asked for; {shape} "
            f"comes closest and {too_large(items, room.capacity)}"
        )
    if refusals.reasons:
        return f"{what}: " + "; ".join(refusals.lines(3))
    return f"{what}: one rank takes ZeRO 0 alone, which shards nothing; leave --zero out"
