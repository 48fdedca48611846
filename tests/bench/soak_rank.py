"""A rank of the soak: train.py's loop, looking at its own process every so many steps and writing down what it holds.

The process that starts the ranks runs this too; rank 0 looks at it as well.
"""

import ctypes
import gc
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE = "HSAP_BENCH_SOAK"
MIDDLE = "middle"
"""The file that says from which step on the second run goes."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told. folder: for samples and plans. every: steps between samples.

    The run ends with the step that begins after so many seconds, or with the last step; None: there is no such limit.
    aside: half-way the newest checkpoint is put aside, for a second run to go on from.
    """

    folder: str
    every: int
    seconds: float | None = None
    last_step: int | None = None
    aside: bool = False

    def done(self, seconds: float, step: int) -> float:
        """Give which part of the way is behind a run that begins a step."""
        parts = (0.0, seconds / (self.seconds or math.inf), step / (self.last_step or math.inf))
        return max(parts)


class _Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "_")
    ]


class Watcher:
    """Looks at this process, between steps."""

    def __init__(self, order: Order, updates) -> None:
        import torch.distributed as dist

        from hsap.runtime.groups import job_store

        self.order, self.updates, self.rank = order, updates, dist.get_rank()
        self.folder = Path(order.folder)
        self.store = job_store() if self.rank == 0 else None
        self.begun = time.monotonic()
        self.to_put_aside = order.aside and self.rank == 0
        self.samples = (self.folder / f"samples-{self.rank}.jsonl").open("a", encoding="utf-8")
        self.plans = (self.folder / f"used-{self.rank}.txt").open("a", encoding="utf-8")
        self.libc = ctypes.CDLL(None)
        self.mallinfo = getattr(self.libc, "mallinfo2", None)
        if self.mallinfo is not None:
            self.mallinfo.restype = _Allocated

    def before(self, step) -> None:
        """A step begins: say which plans it uses; put a checkpoint aside or end the run where it is time."""
        number, order = step.batch.step, self.order
        if self.updates.mesh.sp_rank == 0:
            self.plans.writelines(f"{plan.hash}\n" for plan in step.plans)
            self.plans.flush()
        done = order.done(time.monotonic() - self.begun, number)
        if self.to_put_aside and done >= 0.5:
            self.to_put_aside = not _put_aside(Path(self.updates.config.out), self.folder.parent)
        if self.rank == 0 and done >= 1 and not self.to_put_aside:
            os.kill(os.getpid(), signal.SIGTERM)

    def after(self, step) -> None:
        """A step is done: sample, if it is time."""
        if step.batch.step % self.order.every == 0:
            self.samples.write(json.dumps({"step": step.batch.step} | self.sample()) + "\n")
            self.samples.flush()

    def sample(self) -> dict:
        """What this process holds now: bytes and counts."""
        gc.collect()
        held = {
            "seconds": time.monotonic() - self.begun,
            **memory(os.getpid()),
            "blocks": sys.getallocatedblocks(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "arena": self.updates.session.arena.bytes.numel(),
        }
        if self.mallinfo is not None:
            told = self.mallinfo()
            held["malloc"] = told.uordblks + told.hblkhd
        if self.rank == 0:
            starter = os.getppid()
            held["store_keys"] = self.store.num_keys()
            held["shared_files"] = len(os.listdir("/dev/shm"))
            held["starter"] = memory(starter)["own"]
            held["starter_descriptors"] = len(os.listdir(f"/proc/{starter}/fd"))
            held["starter_threads"] = len(os.listdir(f"/proc/{starter}/task"))
        return held


def memory(pid: int) -> dict:
    """Bytes of a process in memory, and those that no other process has."""
    held = {"Rss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in held:
            held[name] = int(rest.split()[0]) * 1024
    return {"resident": held["Rss"], "own": held["Private_Clean"] + held["Private_Dirty"]}


def _put_aside(out: Path, folder: Path) -> bool:
    """Copy the newest checkpoint, and the metrics up to it, to where a second run goes on; False: there is none yet."""
    from tests.bench.runs import cut_back

    latest = out / "checkpoints" / "latest"
    if not latest.exists():
        return False
    step = int(latest.read_text().removeprefix("step"))
    cut_back(out, step, folder / "second")
    (folder / MIDDLE).write_text(str(step))
    return True


def _count_verified(folder: Path, rank: str) -> None:
    """Write down the hash of every plan that the verifier lets pass in this rank."""
    import hsap.planning.compiling as compiling

    verify, file = compiling.verify, (folder / f"verified-{rank}.txt").open("a", encoding="utf-8")

    def verified(plan):
        report = verify(plan)
        if report.ok:
            file.write(f"{plan.hash}\n")
            file.flush()
        return report

    compiling.verify = verified


def _watch(order: Order) -> None:
    """Have the loop watched."""
    from hsap.train.updates import Updates

    _count_verified(Path(order.folder), os.environ["RANK"])
    make, watchers = Updates.make, []

    def watched(updates, step, *arguments):
        if not watchers:
            watchers.append(Watcher(order, updates))
        watchers[0].before(step)
        figures = make(updates, step, *arguments)
        watchers[0].after(step)
        return figures

    Updates.make = watched


def main() -> None:
    """Do what train.py does, watched where this is a rank."""
    sys.path[0] = str(REPOSITORY)
    if "RANK" in os.environ:
        os.environ["DS_ACCELERATOR"] = "cpu"
        _watch(Order(**json.loads(os.environ[VARIABLE])))
    from hsap.train.launch import main as train

    train(REPOSITORY / "configs")


if __name__ == "__main__":
    main()
