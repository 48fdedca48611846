"""Command line: `hsap plan`, `hsap verify`, `hsap simulate`, `hsap planners`. Starts without torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hsap.api import compile
from hsap.commands.simulate import add_simulate
from hsap.ir.grid import chart_grids, pattern_grid
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.listing import Listing
from hsap.ir.mask import Mask
from hsap.ir.plan import MAGIC, Plan
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.summary import summary
from hsap.ir.text import parse, stream_lines
from hsap.planners import check_options, listing
from hsap.verify import verify

OK, NOT_OK, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 fine, 1 a plan that is not valid, 2 bad input (one paragraph)."""
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except OSError as error:
        print(f"hsap {arguments.command}: {error.filename}: {error.strerror}; check the path", file=sys.stderr)
        return BAD_INPUT
    except ValueError as error:
        print(f"hsap {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hsap", description="Plans for attention over packed sequences on many ranks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="compile a packed batch and show its plan")
    lengths = plan.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", metavar="N,N,…", help="document lengths in tokens")
    lengths.add_argument("--lengths-file", metavar="F.json", help="a batch, or a list of batches")
    plan.add_argument("--topology", default="4x1", metavar="NxM", help="InterSP × IntraSP (default 4x1)")
    plan.add_argument("--planner", default="sap", metavar="NAME[:k=v,…]", help="see `hsap planners` (default sap)")
    plan.add_argument("--heads", default="8:2:128", metavar="Q:KV:DIM", help="default 8:2:128")
    plan.add_argument("--dtype", default="bf16", help="of q, k, v (default bf16)")
    plan.add_argument("--mask", default="causal", metavar="NAME[:p,…]", help="of every document (default causal)")
    plan.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="default 8")
    plan.add_argument("--max-tokens-per-rank", type=int, metavar="N", help="refuse plans that give a rank more")
    plan.add_argument(
        "-o", "--out", metavar="FILE", help="keep a sound plan; FILE.txt gets its text, else the stored form"
    )
    plan.add_argument("--rank", type=int, metavar="R", help="show only this rank's streams")
    plan.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    plan.set_defaults(run=_plan)
    verify = commands.add_parser("verify", help="check a stored plan, its text, or a listing in the paper's spelling")
    verify.add_argument("file", metavar="FILE")
    verify.set_defaults(run=_verify)
    add_simulate(commands)
    planners = commands.add_parser("planners", help="list the planners")
    planners.add_argument("--json", action="store_true")
    planners.set_defaults(run=_planners)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    layouts, is_list = _layouts(arguments)
    if arguments.out == "":
        raise ValueError("--out: the file's name is empty; give the path to keep the plan at")
    if is_list and arguments.out:
        raise ValueError(f"--out {arguments.out}: there are {len(layouts)} batches; give a file with one batch")
    name, options = read_planner(arguments.planner)
    check_options(name, options)  # before they stand among compile's own arguments
    figures, code = [], OK
    for layout in layouts:
        start = time.perf_counter()
        plan = compile(_problem(arguments, layout), name, **options)
        report = verify(plan)
        plan_s = time.perf_counter() - start
        if arguments.rank is not None and not 0 <= arguments.rank < plan.num_ranks:
            raise ValueError(f"--rank {arguments.rank}: the topology has ranks 0 to {plan.num_ranks - 1}")
        if not report.ok:
            print(report, file=sys.stderr)
            code = NOT_OK
        elif arguments.out:
            _keep(plan, Path(arguments.out))
        figures.append(_figures(plan, plan_s, bool(report.ok)))
        if not arguments.json:
            _show(plan, figures[-1], arguments.rank)
    if arguments.json:
        print(json.dumps(figures if is_list else figures[0]))
    return code


def _verify(arguments: argparse.Namespace) -> int:
    data = Path(arguments.file).read_bytes()
    try:
        subject = Plan.from_bytes(data) if data.startswith(MAGIC) else parse(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{arguments.file}: neither a stored plan nor text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{arguments.file}: {error}") from None
    report = verify(subject)
    print(f"ok{_judged(subject)}" if report.ok else report)
    return OK if report.ok else NOT_OK


def _judged(subject: Plan | Listing) -> str:
    """Say of a listing what a verdict rests on; nothing of a plan, which is judged as a whole."""
    if not isinstance(subject, Listing):
        return ""
    halves = len(subject.transfers)
    if not halves:
        return ": no transfer between the listed ranks, so there was nothing to judge"
    return f": transfers between the listed ranks agree ({halves // 2}); nothing else of a listing can be judged"


def _planners(arguments: argparse.Namespace) -> int:
    rows = listing()
    if arguments.json:
        print(json.dumps(rows))
        return OK
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['summary']}\n{'':<{width}}  {row['paper']}")
        if row["options"]:
            print(f"{'':<{width}}  options: " + ", ".join(f"{key}={value}" for key, value in row["options"].items()))
    return OK


def _layouts(arguments: argparse.Namespace) -> tuple[list[Layout], bool]:
    """Read the batches, and whether they came as a list of batches."""
    if arguments.lengths is not None:
        words = [word for word in arguments.lengths.split(",") if word.strip()]
        if bad := [word for word in words if not word.strip().isdecimal()]:
            raise ValueError(f"--lengths: {bad[0]!r} is no number of tokens; write 3000,1200,50000")
        return [_layout([int(word) for word in words], "--lengths")], False
    path = arguments.lengths_file
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if isinstance(data, list) and any(isinstance(batch, list | dict) for batch in data):
        return [_layout(batch, f"{path}, batch {i}") for i, batch in enumerate(data)], True
    return [_layout(data, path)], False


def _layout(batch: object, where: str) -> Layout:
    packs = batch.get("sequences") if isinstance(batch, dict) else [batch]
    if not isinstance(packs, list) or not all(
        isinstance(pack, list) and all(type(n) is int for n in pack) for pack in packs
    ):
        raise ValueError(f'{where}: a batch is a list of document lengths or {{"sequences": [[…], […]]}}, all integers')
    return Layout.from_lengths([n for pack in packs for n in pack], [len(pack) for pack in packs])


def _problem(arguments: argparse.Namespace, layout: Layout) -> Problem:
    if arguments.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node {arguments.ranks_per_node}: a node has at least one rank")
    return Problem(
        layout,
        HeadShape.parse(arguments.heads, arguments.dtype),
        Topology.parse(arguments.topology),
        ((Mask.parse(arguments.mask), 1),),
        replace(Cluster(), ranks_per_node=arguments.ranks_per_node),
        arguments.max_tokens_per_rank,
    )


def read_planner(text: str) -> tuple[str, dict]:
    """Read `NAME` or `NAME:k=v,…`; values are integers, floats, true, false, none or words."""
    name, _, rest = text.partition(":")
    options = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if key in options:
            raise ValueError(f"--planner {text}: the option {key} is given twice; give it once")
        if not equals or not key.isidentifier():
            raise ValueError(f"--planner {text}: can't read the option {part!r}; write name:option=value,option=value")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> object:
    words = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _keep(plan: Plan, path: Path) -> None:
    if path.suffix == ".txt":
        path.write_text(plan.text(), encoding="utf-8")
    else:
        plan.save(path)


def _figures(plan: Plan, plan_s: float, verified: bool) -> dict:
    return summary(plan) | {"plan_s": plan_s, "verified": verified}


def _show(plan: Plan, figures: dict, rank: int | None) -> None:
    """Print the summary, the block grids, and the streams of one rank or all."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(_summary(figures))
    print("\nhome rank of each shard: " + _row(plan.shards.home.tolist()))
    print("\npatterns, a row per query shard\n" + pattern_grid(plan.shards, plan.slices[0]).draw(colour))
    charts = plan.chart[0]
    same = charts[0].tobytes() == charts[1].tobytes()
    for direction, name in enumerate(("forward and backward",) if same else DIRECTIONS):
        ranks, stages = chart_grids(plan, 0, direction)
        print(f"\ncompute rank, {name}\n{ranks.draw(colour)}\n\nstage, {name}\n{stages.draw(colour)}")
    for direction, name in enumerate(DIRECTIONS):
        for r in range(plan.num_ranks) if rank is None else (rank,):
            print(f"\n{name}\n" + "\n".join(stream_lines(plan, 0, direction, r)))


def _summary(figures: dict) -> str:
    f = figures
    lines = [
        f"planner {f['planner']}, topology {f['topology']}: {f['ranks']} ranks, {f['tokens']} tokens, stages: "
        f"{f['stages']}, instructions: {f['instructions']}, planned in {f['plan_s'] * 1e3:.1f} ms, "
        f"verified: {'yes' if f['verified'] else 'no'}",
        f"tokens per rank: {_row(f['tokens_per_rank'])} (max/mean {_ratio(f['token_imbalance'])})",
        f"area per rank:   {_row(f['area_per_rank'])} (max/mean {_ratio(f['area_imbalance'])})",
    ]
    for direction in ("forward", "backward"):
        d = f[direction]
        lines.append(
            f"{direction + ':':<9} {_size(d['bytes_total'])} sent ({_size(d['bytes_internode'])} between nodes), "
            f"{_size(d['max_recv_bytes_per_rank'])} received by the busiest rank, "
            f"{_size(d['peak_buffer_bytes_per_rank'])} of buffers; partial results travel as {f['wire_dtype']}"
        )
    for name, found in f.get("choice", {}).items():
        told = found if isinstance(found, str) else f"{found * 1e3:.4g} ms of attention a layer"
        lines.append(f"auto: {name}: {told}" + (", chosen" if name == f["planner"] else ""))
    return "\n".join(lines)


def _row(values: list) -> str:
    return " ".join(f"{value:.10g}" for value in values)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _size(num_bytes: float) -> str:
    unit = min(max(int(num_bytes).bit_length() - 1, 0) // 10, 3)
    return f"{num_bytes / (1 << 10 * unit):.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


if __name__ == "__main__":
    sys.exit(main())
