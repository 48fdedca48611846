"""Agreement: what it costs a step that its ranks compare plans and batch, in one run with and without.

`python -m tests.bench.agreement [STEPS]`: two gloo ranks train, comparing at every second step only; the ratio of the
medians of the two halves, and of each half with itself, which is what noise alone gives. The position record is on in
both: `python -m tests.bench.position` measures that.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.record import caption, conditions, record
from tests.parity import Case, arguments, run_world, write_data

WARM = 20
SIZES = {"small": (192, ()), "tiny": (2048, ("model.num_layers=4", "model.hidden_dim=128", "model.ffn_dim=352"))}
"""Tokens of a pack, and what differs from the parity tests' model, by name."""


def main(steps: int = 400) -> None:
    """Run each size and print a table."""
    found, figures = conditions(), {}
    print(caption(found, ranks=2, steps=steps))
    with tempfile.TemporaryDirectory(prefix="bench-agreement-") as made:
        data = write_data(Path(made))
        for name, (pack_tokens, options) in SIZES.items():
            out = Path(made) / name
            run = arguments(Case("2x1"), data, out, steps)
            run_world(2, [[*run, f"data.pack_tokens={pack_tokens}", *options]], out, Path(__file__))
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            times = [line["step_s"] for line in lines if line["step"] > WARM]
            compared, not_compared = times[1::2], times[0::2]  # the first one behind the warm steps is odd
            ratio = _ratio(compared, not_compared)
            noise = [_ratio(half[1::2], half[0::2]) for half in (compared, not_compared)]
            figures[name] = {"ratio": ratio, "noise": noise, "step_ms": 1e3 * statistics.median(compared)}
            print(
                f"{name}: a step of {figures[name]['step_ms']:.1f} ms takes {ratio:.3f} of one that isn't compared "
                f"(noise: {noise[0]:.3f}, {noise[1]:.3f})"
            )
    record("agreement", figures, found)


def _ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(some) / statistics.median(others)


def _rank(listed: str) -> None:
    """Train the runs of a file, comparing at even steps."""
    import hsap.train.updates as updates
    from tests.parity import rank

    check = updates.check_step
    updates.check_step = lambda batch, *more: check(batch, *more) if batch.step % 2 == 0 else None
    rank.main(json.loads(Path(listed).read_text(encoding="utf-8")))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].endswith(".json"):
        _rank(sys.argv[1])
    else:
        main(*map(int, sys.argv[1:]))
