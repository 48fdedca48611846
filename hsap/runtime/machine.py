"""Machine: one rank's interpreter of a plan. The reference runs many of them, the executor one.

A run is a generator that yields whenever the rank must let others go first; with one process a rank the transport
blocks instead, and nothing is ever yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.ir.precision import Precision
from hsap.ir.program import Role, Space
from hsap.position import Position
from hsap.position import decode as spelled
from hsap.runtime.decode import Decoded, Decoder
from hsap.runtime.kernels import Kernel
from hsap.runtime.kernels.delta import row_delta
from hsap.runtime.memory import DTYPE_NAMES, TORCH_DTYPES, Arena, View
from hsap.runtime.ranges import Ranges, stream_name
from hsap.runtime.record import Recorder
from hsap.runtime.transport import Transport

Result = TypeVar("Result")

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, slots=True)
class Kept:
    """What forward keeps for backward. q: [T, H, D]; kv: [T, 2, H_kv, D], head-resharded if intra_sp > 1.

    o: [T, H, D] and lse: [T, H] of the rank's own rows.
    """

    q: Tensor
    kv: Tensor
    o: Tensor
    lse: Tensor


class Machine:
    """Runs a plan's streams for one rank.

    dtype: of q, k, v; where it is not the plan's, buffers are allocated apart from the arena. position, recorder and
    ranges may be changed between runs; without the last two nothing is recorded or named. Ranges are for a machine
    that never yields: they nest. layer: the model's, for all three.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        kernel: Kernel,
        arena: Arena,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.plan, self.rank, self.transport, self.kernel, self.device = plan, rank, transport, kernel, device
        name = plan.problem.heads.dtype if dtype is None else DTYPE_NAMES[dtype]
        own = name == plan.problem.heads.dtype
        self.precision = plan.precision if own else Precision.of(name)
        self.arena = arena.reserve(int(plan.arena_bytes()[rank])) if own else None
        self.decoded: dict[tuple[int, int], Decoded] = {}
        self.position = Position()
        self.recorder: Recorder | None = None
        self.ranges: Ranges | None = None

    @property
    def at(self) -> str:
        """The instruction that runs, in words."""
        return str(spelled(self.position.words[0]) or "idle")

    def decode(self, mask: int, direction: int) -> Decoded:
        """Decode a stream, once."""
        known = self.decoded.get((mask, direction))
        if known is None:
            decoder = Decoder(
                self.plan, mask, direction, self.rank, self.kernel, self.precision, self.arena, self.device
            )
            known = self.decoded[mask, direction] = decoder.decode()
        return known

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: int = 0, layer: int = 0) -> Iterator[Kept | None]:
        """Attend the rank's own rows: yields None to let others run, and at last what backward needs, o included.

        q: [T, H, D]; k, v: [T, H_kv, D], the rank's local rows.
        """
        decoded = self.decode(mask, FORWARD)
        memory = decoded.memory
        kept = self._enter(decoded, q, k, v)
        result = memory.allocate(decoded.buffers, memory.index(Space.OUTPUT, Role.O))
        yield from self._run(decoded, mask, FORWARD, layer)
        memory.release()
        assert result.stats is not None, "o comes with its lse"
        yield Kept(*kept, result.rows, result.stats)

    def keep(
        self, q: Tensor, k: Tensor, v: Tensor, mask: int = 0, layer: int = 0
    ) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Give `Kept.q` and `Kept.kv` as `forward` does, and compute nothing: yields None to let others run.

        Of the forward stream only the all-to-alls of inputs run, where intra_sp > 1; nothing of it is recorded.
        """
        decoded = self.decode(mask, FORWARD)
        views, transport = decoded.memory.views, self.transport
        kept = self._enter(decoded, q, k, v)
        place = self.position.enter(FORWARD, layer, transport)
        for i in decoded.keeping:
            place[0] = decoded.codes[i]
            while decoded.steps[i](views, transport) is False:
                yield None
        self.position.leave()
        decoded.memory.release()
        yield kept

    def _enter(self, decoded: Decoded, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put the inputs where the forward stream reads them; gives what is kept of them: (q, kv)."""
        memory, kept = decoded.memory, []
        for role, tensor in ((Role.Q, q.contiguous()), (Role.KV, torch.stack((k, v), dim=1))):
            memory.views[memory.index(Space.INPUT, role)] = View(tensor)
            if memory.has(Space.KEPT, role):
                tensor = memory.allocate(decoded.buffers, memory.index(Space.KEPT, role)).rows
            kept.append(tensor)
        return kept[0], kept[1]

    def backward(
        self, do: Tensor, kept: Kept, mask: int = 0, layer: int = 0
    ) -> Iterator[tuple[Tensor, Tensor, Tensor] | None]:
        """Give the gradients of the rank's own rows: yields None to let others run, and at last (dq, dk, dv).

        do: [T, H, D], the gradient of o.
        """
        decoded = self.decode(mask, BACKWARD)
        memory, views = decoded.memory, decoded.memory.views
        stat = TORCH_DTYPES[self.precision.stat]
        do = do.contiguous()  # the gradient of a sum is one number, seen as many
        delta = row_delta(do, kept.o, TORCH_DTYPES[self.precision.acc])
        stats = torch.stack((kept.lse.to(stat), delta.to(stat)), dim=1)
        views[memory.index(Space.INPUT, Role.Q)] = View(kept.q)
        views[memory.index(Space.INPUT, Role.KV)] = View(kept.kv)
        views[memory.index(Space.INPUT, Role.DO)] = View(do, stats)
        dq = memory.allocate(decoded.buffers, memory.index(Space.OUTPUT, Role.DQ))
        dkv = memory.allocate(decoded.buffers, memory.index(Space.OUTPUT, Role.DKV))
        yield from self._run(decoded, mask, BACKWARD, layer)
        memory.release()
        yield dq.rows, dkv.rows[:, 0], dkv.rows[:, 1]

    def _run(self, decoded: Decoded, mask: int, direction: int, layer: int) -> Iterator[None]:
        views, transport, mark, ranges = decoded.memory.views, self.transport, None, self.ranges
        place = self.position.enter(direction, layer, transport)
        if self.recorder is not None:
            mark = self.recorder.begin(self.plan, self.rank, mask, direction, layer, decoded.step_of)
        if mark is None and ranges is None:
            for place[0], step in zip(decoded.codes, decoded.steps):
                while step(views, transport) is False:
                    yield None
        else:
            name = stream_name(direction, layer, mask)
            yield from self._watched(decoded, mark or _nothing, ranges or _Unnamed(), name)
        self.position.leave()

    def _watched(self, decoded: Decoded, mark: Callable[[], None], ranges: Ranges, name: str) -> Iterator[None]:
        """Run with a clock's mark after every step and a range around it."""
        views, transport, place = decoded.memory.views, self.transport, self.position.words
        ranges.push(name)
        for place[0], step, named in zip(decoded.codes, decoded.steps, decoded.names):
            ranges.push(named)
            while step(views, transport) is False:
                yield None
            ranges.pop()
            mark()
        ranges.pop()


class _Unnamed:
    """No ranges, where only the clock is read."""

    def push(self, _: str) -> None:
        pass

    def pop(self) -> None:
        pass


def _nothing() -> None:
    pass


def check_proven(who: str, plan: Plan) -> None:
    """Refuse a plan that was read from a file or a text and not verified since: it may hang, or reach too far."""
    if plan.unproven:
        raise ValueError(
            f"{who}: the plan was read from a file or a text, and nothing has verified it; call hsap.verify(plan), "
            "which lets a sound one run, or compile the batch again"
        )


def finish(run: Iterator[Result | None]) -> Result:
    """Drive a run whose transport blocks to its result."""
    for value in run:
        if value is not None:
            return value
    raise AssertionError("a run ends with its result")
