"""`python -m tests.bench.attention`: the executor on gloo ranks against one process, DeepSpeed and torch.

Start-up, planning, decoding and connecting are excluded, and everything has run once on a small pack. CPU seconds are
the sum over ranks of whole processes, gloo's threads and the system's part included, divided by what the kernel takes
for the whole pack in one process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hsap
from hsap.calibrate.processes import run_ranks
from hsap.cli.plan import read_planner
from hsap.ir.check import Refused
from hsap.ir.plan import Plan
from tests.bench.attention import ranks
from tests.bench.attention.cases import FULL, NUM_RANKS, OURS, QUICK, RING, ULYSSES, Case
from tests.bench.attention.interpreter import dispatch
from tests.bench.record import RESULTS, caption, conditions, record

LEGEND = (
    "ratio: CPU seconds of all ranks over one process's, alone on the machine, the mean of before and after (aim "
    "1.10); busy: over one process's as all cores do the same. kernel … a2a: the ranks' CPU seconds by kind of step, "
    "main threads only; threads: those of other threads (gloo's); rest: the main threads' outside steps. error: "
    "largest difference to one process over the tensor's largest value. µs/instr.: the interpreter's own code, with "
    "nothing to compute (aim 10)."
)
TITLES = ("CPU s", "ratio", "busy", "wall s", "kernel", "fold", "launch", "wait", "a2a", "threads", "rest", "error")


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Print a table for every case and keep their figures."""
    asked = _parser().parse_args(argv)
    found = conditions()
    print("attention: " + caption(found, ranks=asked.ranks, threads_per_rank=1) + f"\n{LEGEND}")
    lines = []
    for case in QUICK if asked.quick else FULL:
        if asked.case in (None, case.name):
            lines += measure(case, asked.ranks, asked.method, asked.runs)
    record("attention", {"quick": asked.quick, "ranks": asked.ranks, "lines": lines}, found, folder)


def measure(case: Case, num_ranks: int, methods: Sequence[str] | None, runs: int) -> list[dict]:
    """Measure a case by every method, and print its table."""
    methods = methods or [ULYSSES, *([RING] if case.is_one_document else []), *OURS]
    with tempfile.TemporaryDirectory(prefix="bench-attention-") as folder:
        ranks.write_inputs(case, Path(folder))
        for name in ranks.WARM:
            _compile(case.small(num_ranks), name, num_ranks, ranks.plan_path(folder, f"warm-{name}"))
        lines = [{"method": name} | _compiled(case, name, num_ranks, Path(folder)) for name in methods]
        able = [line["method"] for line in lines if "refused" not in line]
        told = run_ranks(num_ranks, ranks.together, case, folder, able)
        busy = [one[ranks.BUSY]["cpu_s"] for one in told if one[ranks.BUSY]]
        alone = [told[0][which]["cpu_s"] for which in (ranks.ALONE, ranks.ALONE_AFTER)]
        base = {"alone_s": sum(alone) / len(alone), "alone_each_s": alone, "busy_s": sum(busy) / len(busy)}
        print(
            f"\n{case.name}: {len(case.lengths)} documents, {case.num_tokens} tokens × {case.layers} layers, heads "
            f"{case.heads.num_q_heads}:{case.heads.num_kv_heads}:{case.heads.head_dim} {case.heads.dtype}; one process "
            f"{alone[0]:.2f} CPU s alone before the methods and {alone[1]:.2f} after, {base['busy_s']:.2f} with every "
            "core busy\n" + _header()
        )
        for line in lines:
            line |= {"case": case.name, "tokens": case.num_tokens, "layers": case.layers} | base
            if "refused" not in line:
                line |= summed([one[line["method"]] for one in told], base)
                path = ranks.plan_path(folder, line["method"])
                if path.exists():
                    cost = dispatch(Plan.load(path), runs)
                    line |= {"us_per_instruction": cost.us_per_instruction, "us_by_step": cost.us_by_step}
            print(_text(line), flush=True)
    return lines


def summed(told: Sequence[dict], base: dict) -> dict:
    """Put the ranks' figures together."""
    cpu_s, main_s = (sum(one[key] for one in told) for key in ("cpu_s", "main_s"))
    parts: dict[str, float] = {}
    for one in told:
        for part, seconds in one.get("parts_s", {}).items():
            parts[part] = parts.get(part, 0.0) + seconds
    out = {
        "cpu_s": cpu_s,
        "ratio": cpu_s / base["alone_s"],
        "ratio_busy": cpu_s / base["busy_s"],
        "wall_s": max(one["ended"] for one in told) - min(one["began"] for one in told),
        "threads_s": cpu_s - main_s,
        "page_faults": sum(one["page_faults"] for one in told),
        "max_error": max(one["max_error"] for one in told),
    }
    if parts:
        out |= {"parts_s": parts, "rest_s": main_s - sum(parts.values())}
    if any(one.get("refusal") for one in told):
        out["refusal"] = told[0]["refusal"]
    return out


def _compiled(case: Case, method: str, num_ranks: int, folder: Path) -> dict:
    """Compile a method's plan into the folder; says what it chose, how long it is, or why there is none."""
    if method == RING and not case.is_one_document:
        return {"refused": "it knows no documents: it attends from each to all before it"}
    if method in (ULYSSES, RING):
        if case.num_tokens % (2 * num_ranks) or case.heads.num_kv_heads % num_ranks:
            return {"refused": f"needs tokens that 2 × {num_ranks} divides and KV heads that {num_ranks} divides"}
        return {}
    try:
        plan = _compile(case, method, num_ranks, ranks.plan_path(folder, method))
    except (Refused, ImportError) as error:
        return {"refused": str(error)}
    return {"planner": plan.planner, "instructions": plan.num_instructions}


def _compile(case: Case, method: str, num_ranks: int, path: Path) -> Plan:
    name, options = read_planner(method)
    plan = hsap.compile(case.problem(num_ranks), name, **options)
    report = hsap.verify(plan)
    assert report.ok, str(report)
    plan.save(path)
    return plan


def _header() -> str:
    return f"{'method':<22}" + "".join(f"{title:>10}" for title in (*TITLES, "instr.", "µs/instr."))


def _text(line: dict) -> str:
    chosen = f": {line['planner']}" if line["method"] == "auto" and "planner" in line else ""
    name = f"{line['method'] + chosen:<22}"
    if "refused" in line:
        return f"{name}  refused: {line['refused']}"
    parts = line.get("parts_s", {})
    cells = [f"{line['cpu_s']:.2f}", f"{line['ratio']:.3f}", f"{line['ratio_busy']:.3f}", f"{line['wall_s']:.2f}"]
    kinds = ("kernel", "fold", "launch", "wait", "all_to_all")
    cells += [f"{parts.get(kind, 0.0):.2f}" if parts else "–" for kind in kinds]
    cells += [f"{line['threads_s']:.2f}", f"{line['rest_s']:.2f}" if parts else "–", f"{line['max_error']:.1e}"]
    if "us_per_instruction" in line:
        cells += [str(line["instructions"]), f"{line['us_per_instruction']:.1f}"]
    said = f"  (its public entry: {line['refusal']})" if line.get("refusal") else ""
    return name + "".join(f"{cell:>10}" for cell in cells) + said


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.attention", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="packs of a few thousand tokens, to see that it runs")
    parser.add_argument("--ranks", type=int, default=NUM_RANKS, metavar="R", help="default 8")
    parser.add_argument("--case", metavar="NAME", help="of " + ", ".join(case.name for case in (*FULL, *QUICK)))
    parser.add_argument("--method", nargs="+", metavar="NAME", help=f"of {', '.join((ULYSSES, RING, *OURS))}")
    parser.add_argument("--runs", type=int, default=30, metavar="N", help="runs of the interpreter; the fastest counts")
    return parser


if __name__ == "__main__":
    main()
