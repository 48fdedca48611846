"""Mutants: does the verifier reject everything that is wrong? Every kind of change, on plans of all planners and masks.

    python -m tests.bench.mutants --rejected 20000

Valid plans are changed in one place, in every column there is, or in several at once that fit each other. A mutant that
the verifier rejects is done with; one that it accepts must be right by two oracles: a machine over Z/2^64 that
moves data as early or as late as a real one might, and the reference runtime on memory full of NaN against float64
attention. One that is accepted and isn't right ends the bench with an error. The tables go to results/mutants.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from pathlib import Path

from hsap.verify import verify
from tests.bench.record import RESULTS, caption, conditions
from tests.mutation.bases import MASKS, SHAPES, all_bases
from tests.mutation.judge import KINDS, Tally, judge

ENOUGH = 60
"""Equivalent mutants of a kind, after which it is only drawn on while it has as many that aren't."""


def main(arguments: list[str] | None = None) -> int:
    """Judge mutants until enough are rejected; 1 where one is accepted and wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rejected", type=int, default=20_000, help="how many mutants must be rejected")
    parser.add_argument("--minutes", type=float, default=240, help="when to end anyway")
    parser.add_argument("--topologies", type=int, default=2, help="of each planner and mask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "mutants.md")
    options = parser.parse_args(arguments)
    found, start, tally = conditions(), time.monotonic(), Tally()
    bases = list(all_bases(options.topologies))
    for plan in bases:
        assert verify(plan).ok, str(verify(plan))
    for turn in itertools.count():
        for place, kind in enumerate(KINDS):
            count = tally.by_kind.get(kind, Counter())
            if count["equivalent"] >= ENOUGH and count["equivalent"] > count["rejected"]:
                continue
            base = bases[(turn * 11 + place * 7) % len(bases)]
            judge(tally, base, kind, options.seed + turn)
        late = time.monotonic() - start > 60 * options.minutes
        ended = late or tally.total["rejected"] >= options.rejected
        if ended or turn % 20 == 19:
            write(options.out, tally, len(bases), found)
            print(f"turn {turn}: {dict(tally.total)} in {time.monotonic() - start:.0f} s", flush=True)
        if ended:
            break
    print(*tally.wrong, sep="\n")
    return int(bool(tally.wrong))


def write(path: Path, tally: Tally, num_bases: int, found: dict) -> None:
    """Write the tables."""
    total = tally.total
    lines = [
        "# Mutants", "",
        f"`python -m tests.bench.mutants`, {caption(found)}. {num_bases} valid plans: every planner with every mask "
        f"({', '.join(MASKS)}) on topologies {', '.join(SHAPES)}, one or two masks each.", "",
        "Equivalent: accepted, and right by both oracles. Wrong: accepted, and not right. Every mutant counts once, "
        "however many ways lead to it.", "",
        *_table("planner", tally.by_planner | {"all": total}),
        *_table("kind of change", tally.by_kind),
        "| rule that rejects first | mutants |", "|---|---|",
        *(f"| {rule} | {count} |" for rule, count in tally.rules.most_common()), "",
        *(f"- {wrong}" for wrong in tally.wrong),
    ]  # fmt: skip
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _table(name: str, counts: dict[str, Counter]) -> list[str]:
    columns = ("mutants", "rejected", "equivalent", "wrong")
    lines = [f"| {name} | {' | '.join(columns)} |", "|---" * 5 + "|"]
    return [*lines, *(f"| {key} | {' | '.join(str(c[n]) for n in columns)} |" for key, c in counts.items()), ""]


if __name__ == "__main__":
    sys.exit(main())
