"""Decode: one rank's columns become calls with every index and view range ready. Once per plan, not per layer.

A step is a function of (views, transport). Steps that may have to let other ranks run return False until they are
done; all others return None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsap.ir.effects import touches
from hsap.ir.heads import HeadRun
from hsap.ir.plan import Plan
from hsap.ir.precision import Precision
from hsap.ir.program import KV_ROLES, Buffers, Instruction, Op, Programs, Role, Space
from hsap.ir.reshard import Reshard, reshard
from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1, joined
from hsap.ir.span import row_starts
from hsap.position import decode as spelled
from hsap.position import encode
from hsap.runtime.kernels import Kernel, Work
from hsap.runtime.kernels.merge import merge, reset
from hsap.runtime.memory import Memory, View
from hsap.runtime.resharding import all_to_all
from hsap.runtime.transport import Transport
from hsap.runtime.upload import Upload

Step = Callable[[list[View], Transport], bool | None]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A rank's stream for one mask and direction, ready to run.

    names[i]: what steps[i] is, for traces; codes[i]: the same as a number (`hsap.position`). step_of: int64
    [steps], the instruction of the rank's stream that a step is, or makes ready for. keeping: indices of the steps that
    make what is kept for backward of inputs.
    """

    memory: Memory
    buffers: Buffers
    steps: tuple[Step, ...]
    names: tuple[str, ...]
    codes: tuple[int, ...]
    step_of: np.ndarray
    keeping: tuple[int, ...]


class Decoder:
    """Turns instructions of one rank, mask and direction into steps."""

    def __init__(
        self,
        plan: Plan,
        mask: int,
        direction: int,
        rank: int,
        kernel: Kernel,
        precision: Precision,
        arena: Tensor | None,
        device: torch.device | str,
    ) -> None:
        self.plan, self.mask, self.rank = plan, mask, rank
        self.programs: Programs = plan.programs[mask][direction]
        self.buffers = self.programs.buffers
        self.memory = Memory(plan, self.programs, rank, precision, arena, device)
        self.in_arena = arena is not None
        self.kernel, self.precision, self.device = kernel, precision, device
        self.upload = Upload(device)
        self.starts = row_starts(plan.spans)
        self.scale = plan.problem.heads.head_dim**-0.5
        intra = plan.topology.intra_sp
        self.share = plan.problem.heads.shares(intra)[rank % intra]
        self.joined: dict[int, list[Instruction]] = {}
        self.roles: dict[int, Role] = {}  # what a round brings, or else takes away
        self.touching = self._touches()
        self.first: dict[int, list[int]] = {}
        for buffer, instructions in self.touching.items():
            self.first.setdefault(instructions[0], []).append(buffer)
        self.left_out: set[int] = set()
        self.pieces = self._pieces()

    def decode(self) -> Decoded:
        """Decode the whole stream."""
        steps, codes, step_of = [], [], []
        lo, hi = self.programs.offsets[self.rank], self.programs.offsets[self.rank + 1]
        for number in range(lo, hi):
            instruction = self.programs.instruction(number)
            step = self._step(number, instruction)  # what it makes itself needn't be emptied first
            for buffer in self.first.get(number, ()):
                steps.append(self._empty(buffer))
                codes.append(encode(number - lo, None, Role.NONE))
                step_of.append(number - lo)
            if step is not None:
                steps.append(step)
                role = self.roles.get(instruction.round, instruction.role)
                codes.append(encode(number - lo, instruction.op, role))
                step_of.append(number - lo)
        self.upload.flush()
        at = np.array(step_of, np.int64)
        names = tuple(str(spelled(code)) for code in codes)
        return Decoded(self.memory, self.buffers, tuple(steps), names, tuple(codes), at, self._keeping(at + lo))

    def _keeping(self, at: np.ndarray) -> tuple[int, ...]:
        """Indices of the steps that bring inputs to the column and leave them there. at: each step's instruction.

        The verifier has judged them as a part of the stream; alone they are as sound. Each is a round of its own, in
        which all ranks of a column take part, and every rank runs the same ones in the same order.
        """
        reshards = self.programs.op[at] == Op.ALL_TO_ALL
        kept = self.buffers.space[self.programs.buf[at, 1]] == Space.KEPT
        return tuple(np.flatnonzero(reshards & kept).tolist())

    def _touches(self) -> dict[int, list[int]]:
        """Every accumulator's instructions, in order."""
        lo, hi = self.buffers.offsets[self.rank], self.buffers.offsets[self.rank + 1]
        touched = touches(self.programs)
        mine = (touched.buffer >= lo) & (touched.buffer < hi) & self.buffers.acc[touched.buffer]
        touching: dict[int, list[int]] = {}
        for at, buffer in zip(touched.at[mine].tolist(), touched.buffer[mine].tolist()):
            touching.setdefault(buffer, []).append(at)
        return touching

    def _fresh(self, at: int, buffer: int, heads: HeadRun) -> bool:
        """Whether an instruction finds all of an accumulator empty. If so, it takes over that it be emptied."""
        whole = self._heads(buffer, heads) == (0, self.memory.num_heads[buffer - self.memory.first])
        if not whole or buffer not in self.first.get(at, ()):
            return False
        self.first[at].remove(buffer)
        return True

    def _result(self, buffer: int) -> int:
        """Where what is made at once belongs: the result that an accumulator is only copied to, else itself.

        The copy is then left out. Other buffers than results have their place in the arena from the copy on only.
        """
        _, *after = self.touching[buffer]
        if len(after) != 1 or self.programs.op[after[0]] != Op.COPY:
            return buffer
        copied, buffers = self.programs.instruction(after[0]), self.buffers
        target, (place, *rows) = copied.buf[1], self._rows(buffer, copied.rows)
        alike = all((of[target] == of[buffer]).all() for of in (buffers.rows, buffers.heads))
        _, num_heads = self._heads(buffer, copied.heads)
        whole = (*rows, num_heads) == (0, self.memory.num_rows[place], self.memory.num_heads[place])
        if buffers.space[target] != Space.OUTPUT or not alike or not whole:
            return buffer
        self.left_out.add(after[0])
        return target

    def _step(self, at: int, instruction: Instruction) -> Step | None:
        match instruction.op:
            case Op.SEND | Op.RECV:
                self.joined.setdefault(instruction.round, []).append(instruction)
                if instruction.op == Op.RECV or instruction.round not in self.roles:
                    self.roles[instruction.round] = instruction.role
                return None
            case Op.LAUNCH:
                return self._launch(instruction.round)
            case Op.WAIT:
                round_ = instruction.round
                return lambda views, transport: transport.wait(round_)
            case Op.ATTEND:
                return self._attend(at, instruction)
            case Op.ATTEND_GRAD:
                return self._attend_grad(at, instruction)
            case Op.MERGE | Op.SUM | Op.COPY:
                return None if at in self.left_out else self._fold(instruction)
            case Op.ALL_TO_ALL:
                return self._all_to_all(instruction)
        raise AssertionError(f"no meaning for {instruction.op}")

    def _empty(self, buffer: int) -> Step:
        whole = self.memory.cut(buffer - self.memory.first)

        def empty(views: list[View], _: Transport) -> None:
            rows, stats = whole(views)
            if stats is None:
                rows.zero_()
            else:
                reset(rows, stats)

        return empty

    def _rows(self, buffer: int, rows: tuple[int, int]) -> tuple[int, int, int]:
        """(place in memory, first row, number of rows) of span-table range `rows` inside a buffer."""
        starts = self.starts
        first = int(starts[rows[0]] - starts[self.buffers.rows[buffer, 0]])
        return buffer - self.memory.first, first, int(starts[rows[1]] - starts[rows[0]])

    def _launch(self, round_: int) -> Step:
        parts: dict[tuple[int, int, int], int] = {}  # the same rows may go to many peers
        sends: list[tuple[int, int]] = []
        receives: list[tuple[int, int]] = []
        for transfer in self.joined.pop(round_, ()):
            part = parts.setdefault(self._rows(transfer.buf[0], transfer.rows), len(parts))
            (sends if transfer.op == Op.SEND else receives).append((transfer.peer, part))
        cuts = [self.memory.cut(place, (first, count)) for place, first, count in parts]

        def launch(views: list[View], transport: Transport) -> None:
            tensors = [cut(views).tensors() for cut in cuts]
            out = [(peer, tensor) for peer, part in sends for tensor in tensors[part]]
            back = [(peer, tensor) for peer, part in receives for tensor in tensors[part]]
            transport.launch(round_, out, back)

        return launch

    def _heads(self, buffer: int, heads: HeadRun) -> tuple[int, int]:
        """The heads of an instruction, (first, count) in a buffer that may hold more."""
        if self.buffers.role[buffer] in KV_ROLES:
            return heads.kv_first - int(self.buffers.heads[buffer, 2]), heads.kv_count
        return heads.q_first - int(self.buffers.heads[buffer, 0]), heads.q_count

    def _operand(self, buffer: int, heads: HeadRun) -> Callable[[list[View]], View]:
        """An instruction's heads of one of its buffers."""
        return self.memory.cut(buffer - self.memory.first, heads=self._heads(buffer, heads))

    def _made(self, at: int, buffer: int, heads: HeadRun, stores: bool) -> tuple[Callable[[list[View]], View], bool]:
        """What a kernel's call makes, and whether it is fresh there; see `Kernel`."""
        fresh = stores and self._fresh(at, buffer, heads)
        return self._operand(self._result(buffer) if fresh else buffer, heads), fresh

    def _pieces(self) -> dict[int, np.ndarray]:
        """The slices that each kernel attends, by instruction, in rows of its operands' buffers.

        There neighbours are joined: a document that was cut is often whole again in a rank's memory.
        """
        mine = np.arange(*self.programs.offsets[self.rank : self.rank + 2])
        mine = mine[np.isin(self.programs.op[mine], (Op.ATTEND, Op.ATTEND_GRAD))]
        tables = [self._in_rows(self.programs.instruction(at)) for at in mine.tolist()]
        owner = np.repeat(np.arange(len(mine)), [len(table) for table in tables])
        table, owner = joined(np.concatenate([np.zeros((0, 6), np.int64), *tables]), owner)
        borders = np.searchsorted(owner, np.arange(len(mine) + 1))
        return {at: table[borders[i] : borders[i + 1]] for i, at in enumerate(mine.tolist())}

    def _in_rows(self, instruction: Instruction) -> np.ndarray:
        """An instruction's slices in rows of the operands' buffers."""
        table = self.plan.slices[self.mask][self.programs.index[slice(*instruction.slices)]]
        to_q = self._shift(instruction.buf[0], table[:, Q0])
        to_k = self._shift(instruction.buf[1], table[:, K0])
        table[:, [Q0, Q1]] += to_q[:, None]
        table[:, [K0, K1]] += to_k[:, None]
        table[:, [LO, HI]] += (to_k - to_q)[:, None]
        return table

    def _work(self, at: int, instruction: Instruction) -> Work:
        """The kernel's work in rows of the operands' buffers."""
        heads = instruction.heads
        runs = tuple(
            HeadRun(r.q_first - heads.q_first, r.q_count, r.kv_first - heads.kv_first, r.kv_count)
            for r in self.plan.problem.heads.runs(self.share, heads)
        )
        return Work(self.pieces[at], runs)

    def _shift(self, buffer: int, positions: np.ndarray) -> np.ndarray:
        """What to add to token positions to get rows of a buffer."""
        lo, hi = self.buffers.rows[buffer]
        spans = self.plan.spans[lo:hi]
        by_position = np.argsort(spans[:, 0], kind="stable")
        span = by_position[np.searchsorted(spans[by_position, 0], positions, side="right") - 1]
        return self.starts[lo + span] - self.starts[lo] - spans[span, 0]

    def _attend(self, at: int, instruction: Instruction) -> Step:
        prepared = self.kernel.prepare(self._work(at, instruction), self.device, self.upload)
        q, kv = (self._operand(buffer, instruction.heads) for buffer in instruction.buf[:2])
        o, fresh = self._made(at, instruction.buf[2], instruction.heads, _stores(prepared)[0])
        attend: Callable[..., None] = self.kernel.attend
        more = (self.scale, True) if fresh else (self.scale,)

        def step(views: list[View], _: Transport) -> None:
            attend(prepared, q(views).rows, kv(views).rows, *o(views), *more)

        return step

    def _attend_grad(self, at: int, instruction: Instruction) -> Step:
        prepared = self.kernel.prepare(self._work(at, instruction), self.device, self.upload)
        q, kv = (self._operand(buffer, instruction.heads) for buffer in instruction.buf[:2])
        (dq, fresh_q), (dkv, fresh_kv) = (
            self._made(at, buffer, instruction.heads, stores)
            for buffer, stores in zip(instruction.buf[3:], _stores(prepared))
        )
        place = instruction.buf[2] - self.memory.first
        first, count = self._heads(instruction.buf[2], instruction.heads)
        some = slice(first, first + count)

        def gradient(view: View) -> tuple[Tensor, ...]:
            """The gradient of o, lse and delta."""
            assert view.stats is not None
            if count == view.rows.shape[1]:
                return view.rows, *view.stats.unbind(1)
            return view.rows[:, some], view.stats[:, 0, some], view.stats[:, 1, some]

        do = self.memory.bind(place, gradient)
        more = (self.scale, fresh_q, fresh_kv) if fresh_q or fresh_kv else (self.scale,)
        attend_grad: Callable[..., None] = self.kernel.attend_grad

        def step(views: list[View], _: Transport) -> None:
            grads = dq(views).rows, dkv(views).rows
            attend_grad(prepared, q(views).rows, kv(views).rows, *do(views), *grads, *more)

        return step

    def _fold(self, instruction: Instruction) -> Step:
        """Merge, Sum and Copy: rows and heads of one buffer into another."""
        source, target = (
            self.memory.cut(place, (first, count), self._heads(buffer, instruction.heads))
            for buffer in instruction.buf
            for place, first, count in [self._rows(buffer, instruction.rows)]
        )

        fold: Callable[..., None] = merge

        def merging(views: list[View], _: Transport) -> None:
            fold(*target(views), *source(views))

        def adding(views: list[View], _: Transport) -> None:
            target(views).rows.add_(source(views).rows)

        def copying(views: list[View], _: Transport) -> None:
            theirs, ours = source(views), target(views)
            ours.rows.copy_(theirs.rows)
            if theirs.stats is not None and ours.stats is not None:
                ours.stats.copy_(theirs.stats)

        return {Op.MERGE: merging, Op.SUM: adding, Op.COPY: copying}[instruction.op]

    def _all_to_all(self, instruction: Instruction) -> Step:
        problem = self.plan.problem
        intra = self.plan.topology.intra_sp
        first = self.rank - self.rank % intra
        tokens = self.plan.tokens_per_rank[first : first + intra].tolist()
        to_column = self.buffers.space[instruction.buf[1]] != Space.OUTPUT
        shape: Reshard = reshard(
            instruction.role, bool(to_column), problem.heads, self.precision, tokens, self.rank % intra
        )
        source, target, scratch = (b - self.memory.first for b in instruction.buf)
        if not self.in_arena:
            held = torch.empty(shape.scratch_bytes, dtype=torch.uint8, device=self.device)
            self.memory.views[scratch] = View(held)
        return all_to_all(self.memory, shape, instruction, (source, target, scratch), self.rank % intra, first)


def _stores(prepared: object) -> tuple[bool, bool]:
    """What a kernel's prepared work says of storing; see `Kernel`."""
    return getattr(prepared, "stores", (False, False))
