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
from hsap.tune.room import Room
from hsap.tune.setting import Setting

SHORTER = 0.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A setting with the longest pack that it holds, and the bytes by item of its fullest rank then."""

    setting: Setting
    pack_tokens: int
    memory: dict[str, float]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is left open (None) or fixed of a setting, and the length of pack where that is fixed."""

    topology: Topology | None = None
    zero_stage: int | None = None
    checkpointing: str | None = None
    pack_tokens: int | None = None

    def settings(self, room: Room, shape: Shape) -> list[Setting]:
        """The settings of a shape that are asked for."""
        zero = ZERO_STAGES if self.zero_stage is None else (self.zero_stage,)
        how = CHECKPOINTING if self.checkpointing is None else (self.checkpointing,)
        return [s for s in room.settings(shape, "any") if s.zero_stage in zero and s.checkpointing in how]


def estimate(job: Job, asked: Asked, planner: str | None = None) -> list[Estimate]:
    """Give each topology's setting with the longest pack, from long to short.

    job: with as many packs a step as ranks; its seq_len only bounds a group's ranks. planner: plans packs of the job's
    documents; None: everything even. ValueError: a topology that is none of the job's, and where nothing fits, with
    what needs least.
    """
    room, refusals = Room(job), Refusals()
    wanted = [shape for shape in shapes(job, refusals) if shape.micro_packs == 1]
    if asked.topology is not None:
        wanted = [shape for shape in wanted if shape.topology == asked.topology]
        if not wanted:
            raise Refused(
                f"{asked.topology} is none of the topologies of {job.world} ranks in nodes of "
                f"{job.cluster.ranks_per_node}: its ranks must divide them, fill whole nodes or an equal part of one, "
                f"and IntraSP stay inside a node and within the {job.model.num_q_heads} query heads"
            )
    found, misfits = [], []
    for shape in wanted:
        settings = asked.settings(room, shape)
        each = [(_longest(room, setting, asked.pack_tokens), setting) for setting in settings]
        # Of equally long ones the first needs least time: no checkpointing, the lowest stage.
        tokens, setting = max(each, key=lambda one: one[0], default=(0, None))
        if setting is None:
            continue
        items = room.even(setting, tokens)
        if tokens and planner is not None:
            tokens, items = _planned(job, replace(setting, planner=planner), tokens, asked.pack_tokens is not None)
        if tokens:
            found.append(Estimate(setting, tokens, items))
        else:
            least = min((room.even(s, asked.pack_tokens or 1) for s in settings), key=lambda items: sum(items.values()))
            misfits.append((sum(least.values()), str(shape), least))
    if not found:
        raise Refused(_nothing(job, room, asked, misfits))
    return sorted(found, key=lambda one: -one.pack_tokens)


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


def _planned(job: Job, setting: Setting, tokens: int, fixed: bool) -> tuple[int, dict[str, float]]:
    """Shorten a pack until a plan of the job's documents fits, and give its bytes by item; 0 tokens where a fixed
    length doesn't."""
    shape, items = Shape(setting.dp, setting.topology, 1), {}
    while tokens:
        one = replace(job, seq_len=tokens)
        sampled, room = Attention(one).sampled(shape, setting.planner), Room(one)
        items = room.planned(shape, setting.planner, sampled.tokens, sampled.arena_bytes)[0][setting]
        if room.holds(items):
            break
        tokens = 0 if fixed else int(tokens * SHORTER)
    return tokens, items


def _nothing(job: Job, room: Room, asked: Asked, misfits: Sequence[tuple[float, str, dict[str, float]]]) -> str:
    tokens = asked.pack_tokens or 1
    what = f"{job.name} on {job.cluster.num_nodes} x {job.cluster.name} ({job.world} ranks)"
    if not misfits:
        return f"{what}: one rank takes ZeRO 0 alone, which shards nothing; leave --zero out"
    _, shape, items = min(misfits)
    return (
        f"{what}: a pack of {tokens:,} token{'s' if tokens > 1 else ''} fits nowhere that was asked for; {shape} comes "
        f"closest and {too_large(items, room.capacity)}"
    )
