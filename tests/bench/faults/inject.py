"""Inject: what happens to a rank (kinds), and where in the run it strikes (moments).

A moment is a function of the product that is replaced, in the rank's process alone, by one that strikes first; the
product itself knows nothing of it.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

REACHED, GO_ON = "reached", "go on"
"""Files in the case's folder: the rank writes the first as it strikes; some wait for the second."""
BUG = "a bug that the bench has put here"
_FOREVER_S = 600.0
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. step: it strikes at its moment's first coming after this step has begun, and once only.

    folder: the case's. layer and op: of the instruction, where the moment is one. seconds: that a slow rank sleeps.
    room: the folder whose disk gets full.
    """

    kind: str
    moment: str
    rank: int
    step: int
    folder: str
    layer: int = 1
    op: str = "attend"
    seconds: float = _FOREVER_S
    room: str = ""

    def strike(self) -> None:
        """Let it happen."""
        place = Path(self.folder, REACHED)
        try:
            with place.open("x") as file:
                file.write(f"{os.getpid()} {time.time()}")
        except FileExistsError:  # a run that was started anew
            return
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError(BUG)
            case "slow" | "late":
                time.sleep(self.seconds)
            case "memory":
                _devour()
            case "disk":
                _fill(Path(self.room, "ballast"))
            case "cut":
                _wait_for(Path(self.folder, GO_ON))
            case "diverge":
                pass  # the moment itself gives something else
            case _:
                raise ValueError(f"no such kind: {self.kind}")


class Armed:
    """A fault that waits for its step. struck: whether it has come."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.at, self.struck = fault, 0, False

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        self.at = step

    def come(self) -> bool:
        """Strike, if it is time; tells whether this was it."""
        if self.struck or self.at < self.fault.step:
            return False
        self.struck = True
        self.fault.strike()
        return True


def arm(fault: Fault) -> None:
    """Put a fault into this process, which is the rank that shall have it."""
    armed = Armed(fault)
    if fault.moment == "start":
        armed.come()
        return
    from hsap.train.updates import Updates

    _before(Updates, "make", lambda _, step, *__: armed.begin(step.batch.step))
    MOMENTS[fault.moment](armed)


def _before(owner: object, name: str, then: Callable[..., object]) -> None:
    """Call something with the arguments first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments, **named):
        then(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def _after(owner: object, name: str, then: Callable[[object], object]) -> None:
    """Give on what something makes of the result."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments, **named):
        return then(original(*arguments, **named))

    setattr(owner, name, wrapped)


def _reading(armed: Armed) -> None:
    import hsap.train.run as run

    _before(run, "read_inputs", lambda *_: armed.come())


def _joining(armed: Armed) -> None:
    import hsap.train.run as run

    _before(run, "join", lambda *_: armed.come())


def _loading(armed: Armed) -> None:
    """A batch is put together, on the thread that does so ahead of training."""
    import hsap.data.loader as loader

    if armed.fault.kind == "diverge":
        _after(loader, "build_micro_batch", lambda micro: _other(micro) if armed.come() else micro)
    else:
        _before(loader, "build_micro_batch", lambda *_: armed.come())


def _planning(armed: Armed) -> None:
    """A plan is made, on the same thread; or the rank takes another one than the others."""
    from hsap.planning import exchange
    from hsap.planning.compiling import PlanningSetup

    if armed.fault.kind == "diverge":
        _after(exchange, "opened", lambda both: (_other_plan(both[0]), both[1]) if armed.come() else both)
    else:
        _before(PlanningSetup, "plan", lambda *_: armed.come())


def _instruction(armed: Armed, direction: int) -> None:
    """The first instruction of that op in the middle of a layer's stream."""
    from hsap.ir.program import Op
    from hsap.position import decode as spelled
    from hsap.runtime.executor import Executor
    from hsap.runtime.machine import Machine

    running: dict[str, int] = {}
    for way, name in enumerate(("forward", "backward")):
        _before(Executor, name, lambda *a, way=way, **_: running.update(way=way, layer=a[-1]))

    def struck(step: Callable) -> Callable:
        def wrapped(*arguments):
            if running == {"way": direction, "layer": armed.fault.layer}:
                armed.come()
            return step(*arguments)

        return wrapped

    original = Machine.decode

    def decode(machine: Machine, mask: int, way: int):
        fresh = (mask, way) not in machine.decoded
        decoded = original(machine, mask, way)
        if fresh and way == direction:
            codes = [spelled(code) for code in decoded.codes]
            of_op = [i for i, code in enumerate(codes) if code is not None and code.op is Op[armed.fault.op.upper()]]
            if of_op:
                steps = list(decoded.steps)
                at = of_op[len(of_op) // 2]
                steps[at] = struck(steps[at])
                decoded = machine.decoded[mask, way] = replace(decoded, steps=tuple(steps))
        return decoded

    Machine.decode = decode


def _forward(armed: Armed) -> None:
    _instruction(armed, 0)


def _backward(armed: Armed) -> None:
    _instruction(armed, 1)


def _optimizer(armed: Armed) -> None:
    import torch

    _before(torch.optim.AdamW, "step", lambda *_: armed.come())


def _writing(armed: Armed) -> None:
    """A rank's file of a checkpoint is on the disk, and nobody has been told; on a full disk, before it is written."""
    import hsap.train.checkpoints.saver as saver

    if armed.fault.kind == "disk":
        _before(saver, "write_tensors", lambda *_: armed.come())
    else:
        _after(saver, "write_tensors", lambda written: (armed.come(), written)[1])


def _publishing(armed: Armed) -> None:
    """All files are there; rank 0 makes a checkpoint of them."""
    import hsap.train.checkpoints.saver as saver

    _before(saver, "publish", lambda *_: armed.come())


def _logging(armed: Armed) -> None:
    """Rank 0 writes the figures of a step."""
    from hsap.train.metrics import MetricsLog

    _before(MetricsLog, "write", lambda *_: armed.come())


def _evaluating(armed: Armed) -> None:
    """The first held-out micro-batch is about to be computed; or is another one than the other ranks'."""
    import hsap.train.evaluation as evaluation

    if armed.fault.kind == "diverge":

        def other(batches):
            if not armed.come():
                return batches
            return replace(batches, micro_batches=tuple(map(_other, batches.micro_batches)))

        _after(evaluation, "eval_batches", other)
        return

    original = evaluation.Evaluation.loss

    def loss(self):
        loss_sum = self.loss_sum
        self.loss_sum = lambda *arguments: (armed.come(), loss_sum(*arguments))[1]
        try:
            return original(self)
        finally:
            self.loss_sum = loss_sum

    evaluation.Evaluation.loss = loss


def _other(micro):
    """The same documents' lengths, other tokens."""
    return replace(micro, tokens=micro.tokens[::-1].copy())


def _other_plan(plan):
    """A plan of another planner for the same problem."""
    import hsap

    return hsap.compile(plan.problem, "ring")


MOMENTS: dict[str, Callable[[Armed], None]] = {
    "reading": _reading,
    "joining": _joining,
    "loading": _loading,
    "planning": _planning,
    "forward": _forward,
    "backward": _backward,
    "optimizer": _optimizer,
    "writing": _writing,
    "publishing": _publishing,
    "logging": _logging,
    "evaluating": _evaluating,
}
"""Beside `start`, before anything is imported."""


def _devour() -> None:
    """Take memory, page after page, until somebody puts an end to it."""
    held = []
    while True:
        block = bytearray(1 << 24)
        for at in range(0, len(block), _PAGE):
            block[at] = 1
        held.append(block)
        time.sleep(0.005)


def _fill(ballast: Path) -> None:
    """Leave no room on a disk."""
    block = b"\0" * (1 << 16)
    with ballast.open("wb", buffering=0) as file:
        for size in (len(block), 1):
            try:
                while True:
                    file.write(block[:size])
            except OSError:
                continue


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _FOREVER_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
