"""Run all parity cases and print a table; exit code 1 if one is over its bar."""

import sys
import tempfile
from pathlib import Path

from hsap.checks.difference import ALL_GRADIENTS_BAR, GRADIENT_BAR, LOSS_BAR, NORM_BAR
from tests.parity import CASES, NUM_STEPS, compare, run_cases


def main() -> int:
    """Compare every case with one process."""
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        bases = list(dict.fromkeys(case.base for case in CASES))
        outs = run_cases([*bases, *CASES], Path(folder))
        base_of = dict(zip(bases, outs))
        print(f"base: {bases[0].name}; relative differences, gradients at step 1, loss and norm at step {NUM_STEPS}")
        print(f"{'case':48} {'gradient':>9} {'all':>9} {'loss':>9} {'norm':>9}  worst parameter")
        print(f"{'bar':48} {GRADIENT_BAR:9.0e} {ALL_GRADIENTS_BAR:9.0e} {LOSS_BAR:9.0e} {NORM_BAR:9.0e}")
        for case, out in zip(CASES, outs[len(bases) :]):
            d = compare(base_of[case.base], out)
            mark = "" if d.ok else "  OVER"
            bad += not d.ok
            print(
                f"{case.name:48} {d.gradient:9.1e} {d.all_gradients:9.1e} {d.loss:9.1e} {d.norm:9.1e}  "
                f"{d.parameter}{mark}"
            )
    return int(bad > 0)


sys.exit(main())
