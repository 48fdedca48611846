"""Trial: one case from its start to the verdict. Runs are train.py's own, started as a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from hsap.train.checkpoints.folder import damage, read_state
from tests.bench.faults.cases import EVAL_EVERY, LONG_S, NOT_YET, NUM_STEPS, SAVE_EVERY, STEP, TIMEOUT_S, Case
from tests.bench.faults.inject import GO_ON, REACHED, Fault
from tests.bench.namespaces import PORT, Nodes
from tests.bench.runs import cut_back, figures
from tests.bench.starting import Forked
from tests.parity import REPOSITORY, write_data
from tests.parity.rank import configure
from tests.train.worlds import SMALL_MODEL, World

NUM_RANKS, NUM_NODES = 4, 2
PROGRAM = Path(__file__).with_name("program.py")
MARK = "HSAP_BENCH_CASE"
VERDICT = "verdict.json"
_START_S = 240.0
"""From a case's start to the fault: as long as a machine that is wanted for other things may take."""
_DISK_MB = 24
_MORE_BYTES = 400 << 20
"""What a rank may take beside what it had when it began to take."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case. wrong: what is not as it must be; empty: it has passed.

    seconds: from the fault until everything had ended; None where it never came. said: the message. resumed_from: step.
    """

    case: Case
    seconds: float | None
    said: str
    resumed_from: int | None
    leftovers: tuple[str, ...]
    wrong: tuple[str, ...]

    def to_json(self) -> dict:
        """Give it as JSON values."""
        out = asdict(self) | {"kind": self.case.kind, "moment": self.case.where, "limit_s": self.case.limit_s}
        out.pop("case")
        return out

    @classmethod
    def from_json(cls, case: Case, value: dict) -> Verdict:
        """Read what `to_json` gave."""
        own = {name: value[name] for name in ("seconds", "said", "resumed_from")}
        return cls(case, **own, leftovers=tuple(value["leftovers"]), wrong=tuple(value["wrong"]))


def settings(folder: Path, out: Path, *more: str) -> list[str]:
    """What train.py is told. folder: of the data."""
    data = folder / "ragged.jsonl"
    values = {
        "+topology": "2x2",
        "cluster.ranks_per_node": NUM_RANKS // NUM_NODES,
        "data.path": data,
        "data.eval_path": data,
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.cache": out.parent / "cache",
        "data.pack_tokens": 192,
        "train.steps": NUM_STEPS,
        "train.packs_per_step": 4,
        "train.micro_packs": 2,
        "train.save_every": SAVE_EVERY,
        "train.eval_every": EVAL_EVERY,
        "train.eval_packs": 4,
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "optim.warmup_steps": 2,
        "out": out,
        "guard.timeout_s": TIMEOUT_S,
        "guard.start_timeout_s": LONG_S,
        **{f"model.{key}": value for key, value in SMALL_MODEL.items()},
    }
    return [*(f"{key}={value}" for key, value in values.items()), *more]


class Bench:
    """The unbroken run that others are compared with, and where cases are tried.

    nodes: emulated; None: without. forked: see `starting`; cut cables aside.
    """

    def __init__(self, folder: Path, nodes: Nodes | None = None, forked: bool = False) -> None:
        self.folder, self.nodes, self.forked = folder, nodes, forked
        write_data(folder)
        shutil.rmtree(folder / "unbroken", ignore_errors=True)
        self.base = folder / "unbroken" / "run"
        World(folder, NUM_RANKS, settings(folder, self.base, "train.keep=99")).finish()
        self.steps = figures(self.base)
        assert [step["step"] for step in self.steps] == list(range(1, NUM_STEPS + 1))

    def try_(self, case: Case) -> Verdict:
        """Make the fault and judge what comes of it."""
        home = self.folder / case.folder
        shutil.rmtree(home, ignore_errors=True)
        for name in ("shm", "tmp", "disk"):
            (home / name).mkdir(parents=True)
        with _disk(home / "disk", case.kind == "disk") as disk:
            out = disk / "run"
            if case.moment in NOT_YET:
                # It has got as far as the newest checkpoint before the faults.
                cut_back(self.base, (STEP - 1) // SAVE_EVERY * SAVE_EVERY, out)
            told, seconds, codes, wrong = self._run(case, home, out)
            left = leftovers(home, out)
            message, problems = said(case, told, codes)
            wrong += problems + [f"left behind: {what}" for what in left]
            for path in disk.glob("ballast"):
                path.unlink()
            resumed_from, problems = self._resumed(case, out)
            wrong += problems
        verdict = Verdict(case, seconds, message, resumed_from, tuple(left), tuple(wrong))
        (home / VERDICT).write_text(json.dumps(verdict.to_json()))
        return verdict

    def passed(self, case: Case) -> Verdict | None:
        """The verdict of a case that has passed in an earlier run in the same folder; None where it is to be tried."""
        kept = self.folder / case.folder / VERDICT
        verdict = Verdict.from_json(case, json.loads(kept.read_text())) if kept.exists() else None
        return None if verdict is None or verdict.wrong else verdict

    def _run(self, case: Case, home: Path, out: Path) -> tuple[str, float | None, list[int], list[str]]:
        """Start the run with its fault and wait until nothing of it is there any more.

        Gives what was said, seconds from the fault on, exit codes of what was started, and what was wrong.
        """
        mark = f"{home.name}-{os.getpid()}"
        fault = Fault(**case.fault, folder=str(home), room=str(home / "disk"))
        resume = ("resume=true",) if case.moment in NOT_YET else ()
        arguments = settings(self.folder, out, f"guard.start_timeout_s={case.start_timeout_s}", *case.settings, *resume)
        environment = os.environ | {
            "HSAP_BENCH_FAULT": json.dumps(asdict(fault)),
            MARK: mark,
            "TMPDIR": str(home / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
        }
        told = home / "told"
        if self.forked and case.kind != "cut":
            started = [Forked.start("tests.bench.faults.program", arguments, environment, told, home / "shm")]
        else:
            with told.open("wb") as file:
                started = [
                    subprocess.Popen(command, env=environment | more, cwd=REPOSITORY, stdout=file, stderr=file)
                    for command, more in self._commands(case, home, arguments)
                ]
        watch = _Watch(case, told, mark, self.nodes)
        try:
            wrong = watch.until_gone(started)
        finally:
            for pid in of_case(mark, told):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            codes = [one.wait() for one in started]
            if case.kind == "cut":
                self.nodes.mend(1)
        return told.read_text(errors="replace"), watch.seconds, codes, wrong

    def _commands(self, case: Case, home: Path, arguments: list[str]) -> Iterator[tuple[list[str], dict]]:
        """What is started, and environment variables of its own: train.py, or torchrun on every emulated node."""
        own = _private_memory(home / "shm")
        if case.kind != "cut":
            yield [*own, sys.executable, str(PROGRAM), *arguments], {}
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for node in range(NUM_NODES):
            inside = ["nsenter", f"--net=/proc/{self.nodes.holders[node]}/ns/net"]
            agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NUM_NODES}", f"--node-rank={node}"]
            agent += [f"--master-addr={self.nodes.address(0)}", f"--master-port={port}"]
            agent += [f"--nproc-per-node={NUM_RANKS // NUM_NODES}", f"--log-dir={home / 'agent'}", str(PROGRAM)]
            yield [*inside, *own, *agent, *arguments], {"GLOO_SOCKET_IFNAME": PORT}

    def _resumed(self, case: Case, out: Path) -> tuple[int | None, list[str]]:
        """Go on from the newest checkpoint: the step of that, and what isn't as in the unbroken run."""
        try:
            state = read_state(configure(settings(self.folder, out), NUM_RANKS))
        except ValueError as error:
            return None, [f"not resumable: {error}"]
        at, wrong = state["step"], []
        if at < case.saved:
            wrong.append(f"the newest checkpoint is of step {at}, step {case.saved} had been saved")
        if problem := damage(out / "checkpoints" / f"step{at}", state, state["files"]):
            wrong.append(problem)
        if not case.survives:
            try:
                World(out.parent, NUM_RANKS, settings(self.folder, out, "resume=true")).finish()
            except pytest.fail.Exception as error:
                return at, [*wrong, f"going on failed: {error}"]
        if figures(out) != self.steps:
            wrong.append("the losses aren't the unbroken run's")
        names = {path.name for path in (out / "checkpoints").iterdir()}
        if rest := sorted(names - {"latest", f"step{NUM_STEPS}", f"step{NUM_STEPS - SAVE_EVERY}"}):
            wrong.append(f"among the checkpoints: {', '.join(rest)}")
        return at, wrong


class _Watch:
    """Waits for a case's processes; does from outside what a rank can't do to itself."""

    def __init__(self, case: Case, told: Path, mark: str, nodes: Nodes | None) -> None:
        self.case, self.told, self.mark, self.nodes = case, told, mark, nodes
        self.struck: tuple[int, float] | None = None
        self.seconds: float | None = None
        self._begun, self._had, self._cut = time.time(), 0, False

    def until_gone(self, started: Sequence[subprocess.Popen]) -> list[str]:
        """Wait until all have ended; what was wrong where they don't."""
        while True:
            self._look()
            now = time.time()
            if all(one.poll() is not None for one in started) and not self._there:
                if self.struck is None:
                    return ["it ended before the fault came"]
                self.seconds = now - self.struck[1]
                return []
            begun, limit = (self._begun, _START_S) if self.struck is None else (self.struck[1], self._limit_s)
            if now - begun > limit:
                there = f"{sum(one.poll() is None for one in started)} starters and processes {self._there}"
                return [f"after {limit:.0f} s there still were {there}"]
            time.sleep(0.05)

    @property
    def _there(self) -> list[int]:
        return of_case(self.mark, self.told)

    @property
    def _limit_s(self) -> float:
        return _START_S if self.case.survives else self.case.limit_s

    def _look(self) -> None:
        if self.struck is None:
            with suppress(FileNotFoundError, ValueError):
                pid, at = self.told.with_name(REACHED).read_text().split()
                self.struck = int(pid), float(at)
                self._had = _resident(int(pid))
        if self.struck is None:
            return
        if self.case.kind == "cut" and not self._cut:
            self._cut = True
            self.nodes.cut(1)
            self.told.with_name(GO_ON).touch()
        if self.case.kind == "memory" and _resident(self.struck[0]) > self._had + _MORE_BYTES:
            with suppress(ProcessLookupError):
                os.kill(self.struck[0], signal.SIGKILL)


def of_case(mark: str, told: Path) -> list[int]:
    """Living processes that were given this mark, or speak into that file."""
    wanted, file = f"{MARK}={mark}".encode(), str(told)
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            speaks = any(
                os.readlink(path / "fd" / stream) == file for stream in "12" if (path / "fd" / stream).exists()
            )
            if speaks or wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return sorted(found)


def leftovers(home: Path, out: Path) -> list[str]:
    """What a run leaves where it is of no use: shared memory, temporary files and folders, sockets.

    torch's cache of compiled code, in a folder that it makes wherever it is imported, is meant to stay.
    """
    left = [f"/dev/shm/{path.name}" for path in sorted((home / "shm").iterdir())]
    temporary = (path.name for path in sorted((home / "tmp").iterdir()))
    left += [f"temporary {name}" for name in temporary if not name.startswith("torchinductor_")]
    return left + [f"socket {path.name}" for path in sorted(out.rglob("*")) if path.is_socket()]


def said(case: Case, told: str, codes: list[int]) -> tuple[str, list[str]]:
    """The message, and what is wrong with it and with the exit codes."""
    whole = re.split(r"(?<![\w/])(?=train\.py: )", told)[1:]
    messages = [text.split("\n", 1)[0] for text in whole]
    if case.survives:
        wrong = [] if not any(codes) else [f"exit codes {codes}"]
        return (messages or [""])[0], wrong
    wrong = [] if all(codes) else [f"exit codes {codes}"]
    fits = [one for one, text in zip(messages, whole) if re.search(case.message, text, re.DOTALL)]
    if not fits:
        wrong.append(f"no message matches {case.message!r}")
    most = NUM_NODES if case.kind == "cut" else 1
    if len(messages) > most:
        wrong.append(f"{len(messages)} messages where {most} would do")
    # torch's agent traces its own error, wherever a rank fails.
    if "Traceback" in told and case.kind not in ("raise", "cut"):
        wrong.append("a traceback")
    return (fits or messages or [""])[0].removeprefix("train.py: "), wrong


@contextmanager
def _disk(folder: Path, small: bool) -> Iterator[Path]:
    """A folder; if asked, on a small disk of its own."""
    if not small:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _private_memory(folder: Path) -> list[str]:
    """Put before a command: what it shares in memory lies in a folder of the case, and not among other programs'."""
    return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(folder)]


def _resident(pid: int) -> int:
    """Bytes in memory; 0 where the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
