"""Position: what it costs a rank to note every instruction where others can read it.

`python -m tests.bench.position`: nanoseconds an instruction, of a loop over steps that do nothing, with the note in
shared memory less without it; and of a real plan's forward and backward on one rank the share that its notes take.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import hsap
from hsap.position import Position
from hsap.runtime.kernels import select_kernel
from hsap.runtime.machine import Machine, finish
from hsap.runtime.memory import Arena
from hsap.runtime.transport import Mailbox
from hsap.train.hang.shared import make

NUM_STEPS = 10_000


def nothing(*_: object) -> None:
    """A step."""


def best_s(run: Callable[[], None], rounds: int = 30) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def note_s(num_steps: int = NUM_STEPS) -> float:
    """Seconds that one note takes."""
    words, steps = Position(make(1).record(0)).words, (nothing,) * num_steps
    codes = tuple(range(1 << 16, (1 << 16) + num_steps))

    def without() -> None:
        for _, step in zip(codes, steps):
            step(None, None)

    def noted() -> None:
        for words[0], step in zip(codes, steps):
            step(None, None)

    return (best_s(noted) - best_s(without)) / num_steps


def layer(num_tokens: int) -> tuple[int, float]:
    """Instructions of one layer's forward and backward on one rank, and its seconds."""
    heads = hsap.HeadShape(8, 2, 64, "fp32")
    plan = hsap.compile(hsap.Problem(hsap.Layout.from_lengths([num_tokens]), heads=heads, topology=hsap.Topology(1, 1)))
    kernel = select_kernel("auto", torch.device("cpu"), torch.float32, head_dim=64)
    machine = Machine(plan, 0, Mailbox().for_rank(0), kernel, Arena("cpu"))
    q, do = (torch.randn(num_tokens, 8, 64) for _ in range(2))
    k, v = (torch.randn(num_tokens, 2, 64) for _ in range(2))

    def both() -> None:
        kept = finish(machine.forward(q, k, v))
        finish(machine.backward(do, kept))

    seconds = best_s(both, 5)
    return sum(len(machine.decode(0, direction).steps) for direction in (0, 1)), seconds


def main() -> None:
    """Print both."""
    torch.set_num_threads(1)
    note = note_s()
    print(f"a note: {note * 1e9:.0f} ns")
    for num_tokens in (256, 4096):
        count, seconds = layer(num_tokens)
        share = count * note / seconds
        print(f"{num_tokens} tokens, one rank: {count} instructions in {seconds * 1e3:.2f} ms, notes {share:.1e} of it")


if __name__ == "__main__":
    main()
