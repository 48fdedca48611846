"""`python -m tests.bench.faults`: faults of every kind at every moment of training, and what comes of each.

Ranks are killed, stopped, made to fail, to sleep and to disagree; disks get full, memory runs out, cables are cut. Each
case is a run of its own, four ranks of a small model, started by train.py (over two emulated nodes: by torchrun). Then
it is judged: within the limit everything has ended, with another exit code than 0 and one message that names what is
wrong; no process, shared memory, temporary file, socket or half checkpoint is left; and `resume=true` goes on from the
newest checkpoint to the very losses of a run that was never broken.

Out of memory is a SIGKILL by the bench to a rank that takes more and more, as the kernel or systemd-oomd does it: which
of the two watches makes no difference to anyone who is left. A full disk is a tmpfs of 24 MB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.bench.faults.cases import CASES, KINDS, QUICK, TIMEOUT_S, Case
from tests.bench.faults.trial import NUM_NODES, NUM_RANKS, Bench, Verdict
from tests.bench.namespaces import nodes, refusal
from tests.bench.record import RESULTS, caption, conditions, record

_WORDS = 140
_TITLES = ("kind", "moment", "s", "message", "resumed", "left", "")


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> int:
    """Try the cases, print a row for each, keep table and figures; 1 where any fails, 2 where they can't be made."""
    asked = _parser().parse_args(argv)
    if asked.again and not asked.keep:
        print("bench faults: --again goes on with runs that were kept; name their folder by --keep", file=sys.stderr)
        return 2
    if reason := refusal():
        print(f"bench faults: {reason}", file=sys.stderr)
        return 2
    found = conditions()
    cases = [case for case in (QUICK if asked.quick else CASES) if _wanted(case, asked)]
    home = Path(asked.keep or tempfile.mkdtemp(prefix="bench-faults-"))
    home.mkdir(parents=True, exist_ok=True)
    print(f"faults: {caption(found, ranks=NUM_RANKS, threads_per_rank=1)}; {len(cases)} cases in {home}", flush=True)
    verdicts = []
    with ExitStack() as stack:
        if not asked.keep:
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        made = stack.enter_context(nodes(NUM_NODES, NUM_RANKS // NUM_NODES))
        bench = Bench(home, made, asked.forked)
        earlier = 0
        for case in cases:
            passed = bench.passed(case) if asked.again else None
            earlier += passed is not None
            verdicts.append(passed or bench.try_(case))
            print(_text(verdicts[-1]), flush=True)
    failed = sum(bool(verdict.wrong) for verdict in verdicts)
    print(f"{len(verdicts) - failed} of {len(verdicts)} cases passed")
    rows = [verdict.to_json() for verdict in verdicts]
    if not (asked.kind or asked.moment):
        figures = {"quick": asked.quick, "forked": asked.forked, "timeout_s": TIMEOUT_S, "rows": rows,
                   "passed_earlier": earlier}  # fmt: skip
        record("faults", figures, found, folder)
    if not asked.quick and len(cases) == len(CASES):
        more = {"passed_in_an_earlier_run": earlier} if earlier else {}
        (folder / "faults.md").write_text(table(verdicts, caption(found, ranks=NUM_RANKS, **more)), encoding="utf-8")
    return int(failed > 0)


def table(verdicts: list[Verdict], under: str) -> str:
    """The verdicts in Markdown. under: the conditions."""
    passed = sum(not verdict.wrong for verdict in verdicts)
    slowest = max((v.seconds for v in verdicts if v.seconds is not None and not v.case.survives), default=0.0)
    counts = ", ".join(f"{KINDS[kind]} {count}" for kind, count in Counter(v.case.kind for v in verdicts).items())
    lines = [
        "# Faults",
        "",
        f"`make bench-faults`: {passed} of {len(verdicts)} cases passed ({counts}). `guard.timeout_s={TIMEOUT_S:g}`; "
        f"all had ended at most {slowest:.0f} s after the fault. s: from the fault until no process was left (where "
        "the run goes on: until it had ended well). resumed: the checkpoint from which `resume=true` went on to the "
        "unbroken run's losses, bit for bit. left: processes, shared memory, temporary files, sockets.",
        "",
        f"{under}.",
        "",
        f"| {' | '.join(_TITLES)} |",
        f"|{'---|' * len(_TITLES)}",
    ]
    for verdict in verdicts:
        cells = (text.replace("|", "\\|") for text in _cells(verdict))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(verdict: Verdict) -> tuple[str, ...]:
    case = verdict.case
    said = " ".join(verdict.said.split())
    return (
        KINDS[case.kind],
        case.where,
        "-" if verdict.seconds is None else f"{verdict.seconds:.1f}",
        said if len(said) <= _WORDS else said[:_WORDS].rsplit(" ", 1)[0] + " …",
        "goes on" if case.survives else "no" if verdict.resumed_from is None else f"step {verdict.resumed_from}",
        str(len(verdict.leftovers)) if verdict.leftovers else "nothing",
        "; ".join(" ".join(one.split())[:_WORDS] for one in verdict.wrong) or "passed",
    )


def _text(verdict: Verdict) -> str:
    kind, moment, seconds, said, resumed, left, outcome = _cells(verdict)
    head = f"{kind:<20}{moment:<40}{seconds:>6}  {resumed:<9}{left:<9}{outcome}"
    return f"{head}\n    {said}" if said else head


def _wanted(case: Case, asked: argparse.Namespace) -> bool:
    return (not asked.kind or case.kind in asked.kind) and (not asked.moment or case.moment in asked.moment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cases")
    parser.add_argument("--forked", action="store_true", help="ranks share their start-up: a case takes seconds")
    parser.add_argument("--kind", nargs="+", choices=KINDS, help="only these")
    parser.add_argument("--moment", nargs="+", choices=sorted({case.moment for case in CASES}), help="only these")
    parser.add_argument("--keep", metavar="DIR", help="keep the runs and all that they said here")
    parser.add_argument("--again", action="store_true", help="only what hasn't passed yet of the runs kept in --keep")
    return parser


if __name__ == "__main__":
    sys.exit(main())
