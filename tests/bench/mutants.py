"""Mutants: does the verifier reject everything that is wrong? Every kind of change, on plans of all planners and masks.

    python -m tests.bench.mutants --rejected 20000

Valid plans are changed in one place, in every column there is, or in several at once that fit each other. A mutant that
the verifier rejects is done with; one that it accepts must be right by two oracles: a machine over Z/2^64 that
moves data as early or as late as a real one might, and the reference runtime on memory full of NaN against float64
attention. One that is accepted and isn't right ends the bench with an error. The tables go to results/mutants.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hsap.ir.plan import Plan
from hsap.verify import verify
from tests.bench.record import RESULTS, caption, conditions
from tests.mutation.bases import MASKS, SHAPES, all_bases
from tests.mutation.judge import KINDS, Verdict, judge

SHARE = 12
"""So many mutants of a kind must be rejected for each that isn't, once it has had enough of these."""
COLUMNS = ("mutants", "rejected", "equivalent", "wrong")


@dataclass
class Tally:
    """What became of the mutants, each counted once. wrong: those let through."""

    by_planner: dict[str, Counter] = field(default_factory=dict)
    by_kind: dict[str, Counter] = field(default_factory=dict)
    rules: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    total: Counter = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def add(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.digest in self.seen:
                continue
            self.seen.add(verdict.digest)
            kinds = (self.by_planner.setdefault(verdict.planner, Counter()),
                     self.by_kind.setdefault(verdict.kind, Counter()), self.total)  # fmt: skip
            for count in kinds:
                count["mutants"] += 1
                count[verdict.outcome] += 1
            if verdict.outcome == "rejected":
                self.rules[verdict.why] += 1
            elif verdict.outcome == "wrong":
                self.wrong.append(verdict.why)

    def wanted(self, enough: int) -> list[str]:
        """Kinds to draw on: not those of which enough were right, unless they are few among the rejected."""
        counts = {kind: self.by_kind.get(kind, Counter()) for kind in KINDS}
        return [k for k, c in counts.items() if c["equivalent"] < enough or c["rejected"] > SHARE * c["equivalent"]]


_BASES: list[Plan] = []


def prepare(topologies: int) -> None:
    """Make the valid plans, once in each process."""
    _BASES.extend(all_bases(topologies))
    for plan in _BASES:
        assert verify(plan).ok, str(verify(plan))


def one_turn(task: tuple[int, list[str]]) -> list[Verdict]:
    """Judge a mutant of each kind, each of another plan."""
    turn, kinds = task
    places = ((turn * 11 + list(KINDS).index(kind) * 7) % len(_BASES) for kind in kinds)
    verdicts = (judge(_BASES[place], kind, turn) for place, kind in zip(places, kinds))
    return [verdict for verdict in verdicts if verdict is not None]


def main(arguments: list[str] | None = None) -> int:
    """Judge mutants until enough are rejected; 1 where one is accepted and wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rejected", type=int, default=20_000, help="how many mutants must be rejected")
    parser.add_argument("--minutes", type=float, default=240, help="when to end anyway")
    parser.add_argument("--topologies", type=int, default=2, help="of each planner and mask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enough", type=int, default=20, help="equivalent mutants of a kind that are looked at")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--verdicts", type=Path, help="file that each verdict is added to")
    parser.add_argument("--join", type=Path, nargs="+", help="make the tables of these files of verdicts")
    parser.add_argument("--out", type=Path, default=RESULTS / "mutants.md")
    options = parser.parse_args(arguments)
    found, start, tally = conditions(), time.monotonic(), Tally()
    for path in options.join or ():
        tally.add(Verdict(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
    if options.join:
        write(options.out, tally, found)
        return int(bool(tally.wrong))

    def tasks() -> Iterator[tuple[int, list[str]]]:
        turn = options.seed
        while tally.total["rejected"] < options.rejected and time.monotonic() - start < 60 * options.minutes:
            yield turn, tally.wanted(options.enough)
            turn += 1

    coming: deque = deque()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.workers, prepare, (options.topologies,)) as pool:
        for task in tasks():
            coming.append(pool.apply_async(one_turn, (task,)))
            if len(coming) > 2 * options.workers:
                _note(options, tally, coming.popleft().get(), found, start)
    print(*tally.wrong, sep="\n")
    return int(bool(tally.wrong))


def _note(options: argparse.Namespace, tally: Tally, verdicts: list[Verdict], found: dict, start: float) -> None:
    tally.add(verdicts)
    write(options.out, tally, found)
    if options.verdicts is not None:
        with options.verdicts.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(verdict) + "\n" for verdict in verdicts)
    print(f"{dict(tally.total)} in {time.monotonic() - start:.0f} s", flush=True)


def write(path: Path, tally: Tally, found: dict) -> None:
    """Write the tables."""
    lines = [
        "# Mutants", "",
        f"`python -m tests.bench.mutants`, {caption(found)}. Valid plans of every planner with every mask "
        f"({', '.join(MASKS)}), each on some of the topologies {', '.join(SHAPES)}; one or two masks a plan.", "",
        "Rejected: by the verifier. Equivalent: accepted, and right by both oracles. Wrong: accepted, and not right. "
        "Every mutant counts once, however many ways lead to it; kinds whose mutants are often right are drawn on "
        "until some were, as an oracle takes longer than the verifier.", "",
        *_table("planner", tally.by_planner | {"all": tally.total}),
        *_table("kind of change", {kind: tally.by_kind[kind] for kind in KINDS if kind in tally.by_kind}),
        "| rule that rejects first | mutants |", "|---|---|",
        *(f"| {rule} | {count} |" for rule, count in tally.rules.most_common()), "",
        *(f"- {wrong}" for wrong in tally.wrong),
    ]  # fmt: skip
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _table(name: str, counts: dict[str, Counter]) -> list[str]:
    lines = [f"| {name} | {' | '.join(COLUMNS)} |", "|---" * 5 + "|"]
    return [*lines, *(f"| {key} | {' | '.join(str(c[n]) for n in COLUMNS)} |" for key, c in counts.items()), ""]


if __name__ == "__main__":
    sys.exit(main())
