"""Plan fuzzing: files and texts of plans, damaged at random, never do more than be refused.

    python -m tests.bench.planfuzz --minutes 10
    python -m tests.bench.planfuzz --atheris --minutes 10      # led by coverage; pip install atheris

Bytes are flipped, cut, spliced and repeated; headers get numbers, words and depths that nobody would write, with a
content hash that fits; texts lose and double words and lines. Reading gives a plan or one paragraph, within memory in
proportion to the file and within seconds; a plan that verifies is one that computes attention. The process may have
`ROOM` bytes more than it began with.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import numpy as np

from hsap.api import compile
from hsap.ir import layout, listing, mask, reader, spelling, stored
from hsap.ir import problem as problem_
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.listing import Listing
from hsap.ir.plan import Plan, _assemble
from hsap.ir.problem import Problem, Topology
from hsap.ir.reader import parse
from hsap.verify import placement, verify
from tests.mutation.bases import problem
from tests.mutation.truth import beyond_limits, untrue

Random = np.random.Generator

ROOM = 6 << 30
READ_BASE, READ_SHARE = 16 << 20, 100
"""Memory that reading a file may take: so much, and so many bytes for each of the file's."""
VERIFY_BASE = 2 << 30
"""Memory of verifying: of a batch of 2^24 tokens, named in a few bytes, tables of one number a token are made."""
LIMIT_S = 60
SMALL = 200
"""Tokens of a batch whose attention is compared."""

NASTY = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**4000, 0.5, -0.0, 1e308, 1e-308, float("nan"),
         float("inf"), True, None, "", "a", "\ud800", "x" * 10_000, "1x1", "4096x4096", "causal", "window:1", "O", [],
         {},
         [[]], [0], ["causal"], "[" * 2000, {"name": "a"}, 1 << 24, (1 << 24) + 1, 4096, 4097, 65536)  # fmt: skip


class Misread(AssertionError):
    """Something else than a plan or a paragraph came of it."""


def corpus() -> list[Plan]:
    """Give a few sound plans of all the parts that a file may have."""
    plans = [compile(problem(topology, masks), planner) for topology, masks, planner in (
        ("4x1", ("causal", "function"), "sap"), ("2x2", ("documents",), "usp"), ("3x2", ("lambda:1,3",), "zigzag"),
        ("1x3", ("causal",), "ring"))]  # fmt: skip
    empty = Problem(Layout.from_lengths([]), HeadShape(2, 1, 8), Topology(2, 1), wire_dtype="fp32")
    limited = Problem(
        Layout.from_lengths([5, 3]), HeadShape(2, 1, 8), Topology(2, 1), max_tokens_per_rank=5, arena_multiple=8
    )
    return [*plans, compile(empty, "zigzag"), replace(compile(limited, "ring"), choice={"ring": 1e-3, "sap": "no"})]


def damaged_bytes(random: Random, data: bytes, other: bytes) -> bytes:
    """Flip, cut, splice, repeat or insert, once or a few times."""
    out = bytearray(data)
    for _ in range(random.integers(1, 4)):
        a, b = sorted(int(i) for i in random.integers(0, len(out) + 1, 2))
        match random.integers(7):
            case 0 if out:
                out[min(a, len(out) - 1)] ^= 1 << random.integers(8)
            case 1:
                del out[a:]
            case 2:
                del out[a : min(b, a + 64)]
            case 3:
                out[a:b] = other[a:b]
            case 4:
                out[a:a] = out[a : min(b, a + 4096)]
            case 5:
                out[a : a + 8] = random.choice([0, 1, 255, 127], 8).astype(np.uint8).tobytes()
            case _ if len(out) > 20:  # the length that the header claims
                out[12:20] = int(random.choice([0, 1, len(out), 2**31, 2**62])).to_bytes(8, "little")
    return bytes(out)


def _leaves(value, path=()) -> list[tuple]:
    """Paths to all values in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, each in items for leaf in _leaves(each, (*path, key)))] if path else [
        leaf for key, each in items for leaf in _leaves(each, (key,))]  # fmt: skip


def damaged_header(random: Random, plan: Plan) -> bytes:
    """Change values of the header, and make the content hash fit what is left."""
    header, columns = stored.read(plan.to_bytes())
    header = {key: value for key, value in header.items() if key not in ("columns", "hash")}
    for _ in range(random.integers(1, 3)):
        *way, last = _leaves(header)[random.integers(len(_leaves(header)))]
        place = header
        for key in way:
            place = place[key]
        if random.random() < 0.15 and isinstance(place, dict):
            del place[last]
        elif random.random() < 0.1 and isinstance(place, list):
            place.insert(int(random.integers(len(place) + 1)), place[last])
        else:
            place[last] = NASTY[random.integers(len(NASTY))]
    named = list(columns.items())
    if random.random() < 0.5:
        i = int(random.integers(len(named)))
        name, column = named[i]
        column = np.array(column)
        if column.size and column.dtype != np.bool_:
            limits = np.iinfo(column.dtype)
            column.reshape(-1)[random.integers(column.size)] = random.choice([limits.min, limits.max, -1, 0, 1, 64])
        named[i] = (name, np.repeat(column, 2, axis=0) if random.random() < 0.1 else column)
    try:
        fitting = _assemble(header, dict(named)).hash
    except Exception:  # then the file is refused for what it is
        fitting = "0" * 64
    try:
        return stored.write(header | {"hash": fitting}, named)
    except (ValueError, RecursionError):  # a number of too many digits
        return b""


def damaged_text(random: Random, text: str) -> bytes:
    """Lose, double, exchange and change words and lines."""
    lines = text.split("\n")
    for _ in range(random.integers(1, 4)):
        i, j = (int(k) for k in random.integers(len(lines), size=2))
        words = lines[i].split(" ")
        k = int(random.integers(len(words)))
        match random.integers(6):
            case 0:
                del lines[i]
            case 1:
                lines.insert(i, lines[j])
            case 2:
                lines[i], lines[j] = lines[j], lines[i]
            case 3:
                words[k] = str(random.choice(["", "-1", "9" * 30, "0:99999999", "b0", "->", "{", "NaN", "[0,4)", ";"]))
                lines[i] = " ".join(words)
            case 4:
                words[k] = words[k][: random.integers(len(words[k]) + 1)] + str(
                    random.choice(["0", "1", "9", ":", "\0"])
                )
                lines[i] = " ".join(words)
            case _:
                lines[i] = lines[i] * int(random.choice([2, 50]))
        if not lines:
            lines = [""]
    return "\n".join(lines).encode()


def draw(random: Random, plans: list[Plan]) -> bytes:
    """Give a damaged file."""
    plan, other = (plans[i] for i in random.integers(len(plans), size=2))
    match random.integers(4):
        case 0:
            return damaged_bytes(random, plan.to_bytes(), other.to_bytes())
        case 1:
            return damaged_text(random, plan.text())
        case 2:
            return damaged_bytes(random, plan.text().encode(), other.text().encode())
        case _:
            return damaged_header(random, plan)


def read(data: bytes) -> Plan | Listing | None:
    """Read a file as the command line does; None where it is refused, `Misread` where that isn't one paragraph."""
    try:
        if data.startswith(b"hsap-plan-") and not data.startswith(b"hsap-plan-text"):
            return Plan.from_bytes(data)
        return parse(data.decode("utf-8", "replace"))
    except ValueError as error:
        told = str(error)
        if "\n" in told or not 20 <= len(told) <= 1500 or isinstance(error, UnicodeError):
            raise Misread(f"refused by {error!r:.300}") from error
    return None


def follow(data: bytes, count: Counter, known: set[str]) -> None:
    """Read and judge a file; `Misread`, or whatever comes, where it does more than it may."""
    tracemalloc.start()
    try:
        plan, sound = _judged(data, count)
    finally:
        tracemalloc.stop()
    if isinstance(plan, Plan) and sound:
        count["sound"] += 1
        if plan.hash not in known and plan.problem.layout.num_tokens <= SMALL:
            count["compared"] += 1
            why = beyond_limits(plan) or untrue(plan)
            if why is not None:
                raise Misread(f"a plan that verifies isn't right: {why}")


def _judged(data: bytes, count: Counter) -> tuple[Plan | Listing | None, bool]:
    """Read and verify a file, and see what memory that takes: what was read, and whether it is sound."""
    plan = read(data)
    peak = tracemalloc.get_traced_memory()[1]
    if peak > READ_BASE + READ_SHARE * len(data):
        raise Misread(f"{len(data)} bytes took {peak} to read")
    count["files"] += 1
    count["most memory of reading"] = max(count["most memory of reading"], peak)
    if plan is None:
        return None, False
    tracemalloc.reset_peak()
    report = verify(plan)
    str(report)
    peak = tracemalloc.get_traced_memory()[1]
    if peak > VERIFY_BASE + READ_SHARE * len(data):
        raise Misread(f"{len(data)} bytes took {peak} to verify")
    count["most memory of verifying"] = max(count["most memory of verifying"], peak)
    count["read"] += 1
    return plan, report.ok


def confined() -> None:
    """Let this process have `ROOM` bytes more than now, and end what takes longer than its time."""
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))

    def late(*_: object) -> None:
        raise Misread(f"took more than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)


def main(arguments: list[str] | None = None) -> int:
    """Follow damaged files until the time is up; 1 where one was more than refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="let coverage lead the way")
    parser.add_argument("--keep", type=Path, default=Path("outputs/planfuzz"), help="where files that fail are kept")
    options = parser.parse_args(arguments)
    if options.atheris:
        return led_by_coverage(options)
    plans, count, failed = corpus(), Counter(), 0
    known = {plan.hash for plan in plans}
    for plan in plans:
        follow(plan.to_bytes(), count, set())
        follow(plan.text().encode(), count, set())
    confined()
    start = time.monotonic()
    for number in range(options.seed, 1 << 40):
        if time.monotonic() - start > 60 * options.minutes:
            break
        data = draw(np.random.default_rng(number), plans)
        signal.alarm(LIMIT_S)
        try:
            follow(data, count, known)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{number}.plan").write_bytes(data)
            print(f"seed {number}: {type(error).__name__}: {error!s:.500}", flush=True)
        signal.alarm(0)
        if number % 500 == 499:
            print(f"seed {number}: {dict(count)}, {failed} failed, {time.monotonic() - start:.0f} s", flush=True)
    print(json.dumps({**count, "failed": failed}))
    return int(failed > 0)


def led_by_coverage(options: argparse.Namespace) -> int:
    """Follow what atheris makes of sound files; it ends the process at the first that is more than refused."""
    import atheris

    for module in (stored, reader, spelling, listing, problem_, layout, mask, placement):
        for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
            for function in vars(owner).values():
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    atheris.instrument_func(function)
    seeds = options.keep / "corpus"
    seeds.mkdir(parents=True, exist_ok=True)
    for number, plan in enumerate(corpus()):
        (seeds / f"{number}.plan").write_bytes(plan.to_bytes())
        (seeds / f"{number}.txt").write_bytes(plan.text().encode())
    known, count = {plan.hash for plan in corpus()}, Counter()
    confined()
    flags = ["planfuzz", str(seeds), f"-max_total_time={60 * options.minutes:.0f}", f"-artifact_prefix={options.keep}/"]
    atheris.Setup(flags, lambda data: follow(data, count, known))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
