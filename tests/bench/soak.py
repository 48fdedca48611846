"""`python -m tests.bench.soak`: train for long, and see whether anything grows, fails or isn't repeatable.

Ranks of a small model train on ragged packs of drawn lengths, one-token documents and one longer than any pack among
them; planner auto, every plan verified, with evaluations and checkpoints on the way. Each rank writes down every so
many steps what it holds: memory (its own bytes, and what malloc and Python have given out), descriptors, threads, the
arena, and rank 0 the keys of the job's store and the same of the process that started the ranks. After a third for
warming up, the slope of each is judged (`slopes`). Then a second run goes on from a checkpoint of the middle: its
losses must be the first one's, bit for bit, and its last checkpoint the same bytes.

Everything is written as it goes. A run that was broken off goes on where it was: begun anew in the phase it was in.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hsap.children import asks_to_end_with_us
from tests.bench.curves import Panel, svg
from tests.bench.record import RESULTS, caption, conditions, record
from tests.bench.runs import figures
from tests.bench.slopes import Slope, slope
from tests.bench.soak_rank import MIDDLE, VARIABLE, Order
from tests.bench.starting import Forked
from tests.parity import REPOSITORY

PROGRAM = Path(__file__).with_name("soak_rank.py")
PACK_TOKENS, LONGEST, VOCABULARY, SEED = 512, 1500, 2048, 23
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that must not grow. most: over the judged steps it may, surely or not."""

    key: str
    title: str
    most: float
    unit: tuple[float, str] = (1.0, "")


QUANTITIES = (
    Quantity("own", "memory of its own", 2 * MIB, (MIB, "MiB")),
    Quantity("resident", "resident memory", 2 * MIB, (MIB, "MiB")),
    Quantity("malloc", "given out by malloc", MIB, (MIB, "MiB")),
    Quantity("blocks", "Python's memory blocks", 2000),
    Quantity("descriptors", "file descriptors", 0.5),
    Quantity("threads", "threads", 0.5),
    Quantity("arena", "arena", 0.5, (MIB, "MiB")),
    Quantity("store_keys", "keys of the store", 8),
    Quantity("shared_files", "files in /dev/shm", 0.5),
    Quantity("starter", "memory of the starting process", 2 * MIB, (MIB, "MiB")),
    Quantity("starter_descriptors", "its file descriptors", 0.5),
    Quantity("starter_threads", "its threads", 0.5),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How long and how large. seconds or last_step ends the first run."""

    topology: str = "4x2"
    seconds: float | None = 1800.0
    last_step: int | None = None
    every: int = 5
    save_every: int = 50
    eval_every: int = 40
    documents: int = 3000
    forked: bool = False


class Soak:
    """The two runs in a folder, and what they left there."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.first, self.second = folder / "first", folder / "second"

    def run(self) -> None:
        """Do what isn't done yet; RuntimeError, with what was said, where a run fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.folder / "documents.jsonl"
        if not data.exists():
            write_documents(data, self.size.documents)
        if not self._is_done("first"):
            for path in (self.first, self.second):
                shutil.rmtree(path, ignore_errors=True)
            size, seen = self.size, str(self.folder / "first-seen")
            self._train("first", Order(seen, size.every, size.seconds, size.last_step, aside=True))
        last = figures(self.first)[-1]["step"]
        if not self._is_done("second"):
            self._train(
                "second", Order(str(self.folder / "second-seen"), self.size.every, last_step=last), "resume=true"
            )

    def _is_done(self, name: str) -> bool:
        return (self.folder / f"{name}.done").exists()

    def _train(self, name: str, order: Order, *more: str) -> None:
        shutil.rmtree(order.folder, ignore_errors=True)
        Path(order.folder).mkdir()
        told = self.folder / f"{name}.told"
        told.unlink(missing_ok=True)
        environment = os.environ | {
            VARIABLE: json.dumps(asdict(order)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        arguments = [*self._arguments(self.folder / name), *more]
        if self.size.forked:
            code = Forked.start("tests.bench.soak_rank", arguments, environment, told).wait()
        else:
            with told.open("wb") as file:
                command = [sys.executable, str(PROGRAM), *arguments]
                places = {"env": environment, "cwd": REPOSITORY, "stdout": file, "stderr": file}
                done = subprocess.run(command, **places, check=False, preexec_fn=asks_to_end_with_us())
            code = done.returncode
        if code:
            raise RuntimeError(f"soak: {name} run: exit code {code}\n{told.read_text(errors='replace')[-4000:]}")
        (self.folder / f"{name}.done").touch()

    def _arguments(self, out: Path) -> list[str]:
        """What train.py is told."""
        data = self.folder / "documents.jsonl"
        values = {
            "+topology": self.size.topology,
            "planner": "auto",
            "verify": "true",
            "data.path": data,
            "data.eval_path": data,
            "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
            "data.cache": self.folder / "cache",
            "data.pack_tokens": PACK_TOKENS,
            "data.long_documents": "keep",
            "data.max_document_tokens": LONGEST,
            "train.steps": 1_000_000,
            "train.packs_per_step": 2,
            "train.micro_packs": 1,
            "train.save_every": self.size.save_every,
            "train.eval_every": self.size.eval_every,
            "train.eval_packs": 2,
            "engine.device": "cpu",
            "optim.warmup_steps": 20,
            "model.num_layers": 2,
            "model.hidden_dim": 64,
            "model.head_dim": 8,
            "model.ffn_dim": 96,
            "model.num_q_heads": 8,
            "model.num_kv_heads": 4,
            "model.masks": "window:100+causal",
            "out": out,
        }
        return [f"{key}={value}" for key, value in values.items()]

    def samples(self) -> list[dict[str, list[float]]]:
        """Of each rank, in order: steps and quantities."""
        out = []
        for rank in range(len([*(self.folder / "first-seen").glob("samples-*.jsonl")])):
            lines = (self.folder / "first-seen" / f"samples-{rank}.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            out.append({key: [row[key] for row in rows] for key in rows[0]} if rows else {})
        return out

    def plans(self) -> dict:
        """Plans that ran and those that the verifier passed, and how many of the first are none of the second."""
        used, verified = ([], [])
        for name, into in (("used", used), ("verified", verified)):
            for path in sorted((self.folder / "first-seen").glob(f"{name}-*.txt")):
                into += path.read_text().split()
        return {"used": len(used), "verified": len(verified), "unverified": len(set(used) - set(verified))}

    def repeated(self) -> dict:
        """The second run beside the first: from where it went on, and what differs."""
        first, second = figures(self.first), figures(self.second)
        last = first[-1]["step"]
        states = [_files(run / "checkpoints" / f"step{last}") for run in (self.first, self.second)]
        return {
            "from_step": int((self.folder / MIDDLE).read_text()),
            "last_step": last,
            "differ": [a["step"] for a, b in zip(first, second) if a != b],
            "complete": len(first) == len(second),
            "same_state": states[0] == states[1] and bool(states[0]),
        }


def write_documents(path: Path, count: int) -> None:
    """Write documents of drawn lengths as token ids: every tenth of one token, one longer than any pack."""
    random = np.random.default_rng(SEED)
    lengths = np.clip(random.lognormal(4.5, 1.0, count), 2, PACK_TOKENS).astype(int)
    lengths[::10] = 1
    lengths[count // 2] = LONGEST
    fresh = path.with_suffix(".unfinished")
    with fresh.open("w", encoding="utf-8") as file:
        for i, length in enumerate(lengths.tolist()):
            file.write(json.dumps({"id": str(i), "tokens": random.integers(2, VOCABULARY, length).tolist()}) + "\n")
    fresh.rename(path)


def _files(checkpoint: Path) -> dict:
    """Size and checksum of a checkpoint's files."""
    return json.loads((checkpoint / "hsap.json").read_text(encoding="utf-8"))["files"]


def warm_until(steps: list[float]) -> float:
    """The step up to which samples aren't judged: a third of the way."""
    return steps[0] + (steps[-1] - steps[0]) / 3 if steps else 0.0


def judged(samples: list[dict[str, list[float]]], quantity: Quantity) -> tuple[int, Slope] | None:
    """The rank in which a quantity grows most for certain, and its slope; None: too few samples, or none of it."""
    found = []
    for rank, one in enumerate(samples):
        kept = [i for i, step in enumerate(one["step"]) if step > warm_until(one["step"])]
        if quantity.key in one:
            its = slope(*([one[key][i] for i in kept] for key in ("step", quantity.key)))
            found += [] if its is None else [(rank, its)]
    return max(found, key=lambda pair: (pair[1].low, pair[1].per_step), default=None)


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> int:
    """Run both, print what came of them, keep it; 1 where something grows or differs, or a plan wasn't verified."""
    asked = _parser().parse_args(argv)
    found = conditions()
    size = Size(asked.topology, asked.minutes * 60, None, asked.every)
    if asked.quick:
        size = Size(asked.topology, None, 12, 1, 2, 3, 200, forked=True)
    home = Path(asked.out or tempfile.mkdtemp(prefix="bench-soak-"))
    print(f"soak: {caption(found, topology=size.topology, minutes=asked.minutes)}; in {home}", flush=True)
    soak = Soak(home, size)
    soak.run()
    samples, wrong = soak.samples(), []
    rows = {quantity.key: judged(samples, quantity) for quantity in QUANTITIES}
    for quantity in QUANTITIES:
        if rows[quantity.key] is not None and rows[quantity.key][1].grows(quantity.most):
            wrong.append(f"{quantity.title} grows")
    plans, repeated = soak.plans(), soak.repeated()
    wrong += ["plans that weren't verified"] * (plans["unverified"] > 0 or not plans["used"])
    wrong += ["the second run differs"] * (bool(repeated["differ"]) or not repeated["complete"])
    wrong += ["the last checkpoints differ"] * (not repeated["same_state"])
    told = report(rows, plans, repeated, wrong, caption(found, topology=size.topology))
    print(told)
    told_by_rank = {key: None if row is None else {"rank": row[0], **asdict(row[1])} for key, row in rows.items()}
    line = {"quick": asked.quick, "minutes": asked.minutes, "topology": size.topology, "wrong": wrong}
    record("soak", line | {"slopes": told_by_rank, "plans": plans, "repeated": repeated}, found, folder)
    if not asked.quick:
        (folder / "soak.md").write_text(told, encoding="utf-8")
        (folder / "soak.svg").write_text(drawn(samples), encoding="utf-8")
    if not asked.out:
        shutil.rmtree(home)
    return int(bool(wrong))


def report(
    rows: Mapping[str, tuple[int, Slope] | None], plans: dict, repeated: dict, wrong: list[str], under: str
) -> str:
    """What came of the soak, in Markdown."""
    lines = [
        "# Soak",
        "",
        f"`make bench-soak`: {under}.",
        "",
        f"{repeated['last_step']:,} steps; {plans['used']:,} plans ran, {plans['verified']:,} were made and verified, "
        f"{plans['unverified']} of those that ran weren't. A second run went on from step {repeated['from_step']:,}: "
        + ("every loss the same, bit for bit" if not repeated["differ"] else f"differs at {repeated['differ'][:10]}")
        + (", and so is the last checkpoint. " if repeated["same_state"] else "; the last checkpoints differ. ")
        + f"**{'; '.join(wrong) or 'Passed'}.**",
        "",
        "Slopes after a third for warming up, of the rank in which it surely grows most; ± is half of an interval of "
        "95 % (Theil and Sen, over medians of twelve blocks). A quantity grows where the interval lies above 0 and all "
        "judged steps together gain more than it `may`, at the pace of their second half (`late`) too.",
        "",
        "![Samples of every rank](soak.svg)",
        "",
        "| quantity | rank | at first | at last | a step | ± | late | may gain | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for quantity in QUANTITIES:
        row, (divisor, unit) = rows[quantity.key], quantity.unit
        if row is None:
            lines.append(f"| {quantity.title} | | | | too few samples | | | | |")
            continue
        rank, its = row
        ends = " | ".join(f"{value / divisor:,.6g} {unit}".strip() for value in (its.first, its.last))
        of_bytes = " B" if unit else ""
        rate = f"{its.per_step:+.3g}{of_bytes} | {its.noise:.3g} | {its.late:+.3g}"
        verdict = "grows" if its.grows(quantity.most) else "no growth"
        lines.append(
            f"| {quantity.title} | {rank} | {ends} | {rate} | {quantity.most / divisor:g} {unit} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def drawn(samples: list[dict[str, list[float]]]) -> str:
    """All samples as an SVG."""
    panels = []
    for quantity in QUANTITIES:
        lines = {f"rank {i}": (one["step"], one[quantity.key]) for i, one in enumerate(samples) if quantity.key in one}
        panels.append(Panel(quantity.title, lines, quantity.unit))
    return svg(panels, warm_until(samples[0]["step"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.soak", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some seconds: too short to see growth")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="of the first run (default 30)")
    parser.add_argument("--topology", default="4x2", metavar="NxM", help="default 4x2")
    parser.add_argument("--every", type=int, default=5, metavar="N", help="steps between samples (default 5)")
    parser.add_argument("--out", metavar="DIR", help="keep everything here, and go on from what is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
