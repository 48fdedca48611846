"""Which processes a run needs, decided from what is there; and starting them on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from hsap.ir.problem import Topology
from hsap.launched import Place
from hsap.train import flags
from hsap.train.stopping import SIGNALS

if TYPE_CHECKING:
    from hsap.train.hang.shared import Shared

# What launchers tell a rank about itself; ranks that we start must learn it from their own launcher alone.
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
)
_OURS = (flags.POSITIONS, flags.RESTARTS)
_ENDS = (signal.SIGHUP, signal.SIGQUIT)
"""Signals at which the agent ends ranks at once."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process finds when it starts.

    accelerators: those that this process sees. untold_ranks: how many ranks DeepSpeed's launcher starts when the user
    names no number, 0 under other launchers. started: HSAP itself started this rank.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    accelerators: int = 0
    untold_ranks: int = 0
    started: bool = False


@dataclass(frozen=True, slots=True)
class Train:
    """Train in this process, one of the ranks already there."""

    device: str
    world_size: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start `world_size` ranks on this machine and wait for them."""

    device: str
    world_size: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing to do here: rank 0 starts the ranks."""

    device: str
    world_size: int


def look_around(environment: Mapping[str, str]) -> Surroundings:
    """Read the launcher's variables and count accelerators; ValueError: variables that are no numbers."""
    import torch

    place = Place.of(environment)
    accelerators = torch.cuda.device_count()
    by_deepspeed = "CROSS_SIZE" in environment and place.world_size > 1
    return Surroundings(
        rank=place.rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        accelerators=accelerators,
        untold_ranks=(accelerators or _numa_nodes()) if by_deepspeed else 0,
        started=environment.get(flags.STARTED) == "1",
    )


def _numa_nodes() -> int:
    """Count NUMA nodes as DeepSpeed's launcher does on a machine without accelerators."""
    from deepspeed.utils.numa import get_numa_cores

    return len([cores for cores in get_numa_cores() if cores]) or 1


def decide(topology: str | None, device: str | None, around: Surroundings) -> Train | Start | Leave:
    """Choose between training here, starting ranks and leaving that to rank 0.

    topology, device: as configured, None where left open. ValueError where neither the ranks that were started nor
    those that could be started fit the topology; it says what would.
    """
    if device == "cuda" and around.accelerators == 0:
        raise ValueError("engine.device=cuda, but no CUDA device is visible here; use engine.device=cpu or null.")
    device = device or ("cuda" if around.accelerators else "cpu")
    needed = Topology.parse(topology or f"{around.world_size}x1").num_ranks
    if around.world_size % needed == 0:
        if device == "cuda" and around.local_world_size > around.accelerators:
            raise ValueError(
                f"{around.local_world_size} ranks were started on a machine with {around.accelerators} accelerators; "
                f"start at most {around.accelerators} here, or set engine.device=cpu to run the ranks on the CPU."
            )
        return Train(device, around.world_size)
    # One rank, or as many as DeepSpeed's launcher starts untold, is no choice of the user's: it may be replaced.
    untold = around.world_size == around.local_world_size == around.untold_ranks
    if around.started or not (around.world_size == 1 or untold):
        raise ValueError(_misfit(topology, needed, around.world_size))
    if device == "cpu":
        return Start(device, needed) if around.rank == 0 else Leave(device, needed)
    if around.world_size == 1 and needed <= around.accelerators:
        return Start(device, needed)
    raise ValueError(
        f"topology={topology} needs {needed} ranks, but {around.accelerators} accelerators are visible here. Choose "
        f"one of {_topologies(around.accelerators)}, start {needed} ranks over more nodes (launch/ has scripts), or "
        f"set engine.device=cpu to run all ranks on the CPU."
    )


def _misfit(topology: str | None, needed: int, world_size: int) -> str:
    return (
        f"WORLD_SIZE={world_size} doesn't fit topology={topology}, whose SP group takes {needed} ranks: the number of "
        f"ranks must be a multiple of {needed} ({needed}, {2 * needed}, {3 * needed}, …). With {world_size} ranks "
        f"these fit: {_topologies(world_size)}; and, as several SP groups, all NxM whose product divides {world_size}."
    )


def _topologies(num_ranks: int) -> str:
    return ", ".join(f"{num_ranks // m}x{m}" for m in range(1, num_ranks + 1) if num_ranks % m == 0)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process that must not take itself for a rank of the launcher above."""
    return {
        name: value
        for name, value in environment.items()
        if name not in (*_RANK_VARIABLES, *_OURS) and not name.startswith(("MASTER_", "TORCHELASTIC_"))
    }


def rank_environment(environment: Mapping[str, str], device: str, out: str) -> dict[str, str]:
    """Environment of ranks started here: nothing of the launcher above, one thread a CPU rank, the run's directory."""
    inherited = without_launcher(environment)
    if device == "cpu":
        inherited["OMP_NUM_THREADS"] = "1"
    return {**inherited, flags.STARTED: "1", flags.OUT: out}


def be_alone() -> None:
    """Tell this process what a launcher would tell the only rank of a run, so that plain python needs no case of its
    own later; it is reached from this machine alone."""
    from hsap.train.loopback import keep_here

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    keep_here()


def start_ranks(choice: Start, script: str, arguments: list[str], out: str, *, program: str, restarts: int = 0) -> int:
    """Run `script` as ranks of this machine under torch's elastic agent and wait for them.

    program: whose messages these are, as its user calls it.
    restarts: so many times they are started again after a failure, and go on from the newest good checkpoint; not after
    an error that would come again. Returns 0, or the exit code of the rank that failed first (128 + the signal, where
    one ended it). The agent lives in this very process, so that its report, which repeats what the rank has said, can
    be left out.
    """
    from hsap.train.hang.shared import make
    from hsap.train.loopback import keep_here
    from hsap.train.restarts import go_on

    positions = make(choice.world_size)
    environment = rank_environment(os.environ, choice.device, out) | {flags.POSITIONS: positions.path}
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.get(flags.TRACEBACK) != "1":
        logging.disable(logging.ERROR)
    keep_here()
    # The loopback address, because a machine's own name may not resolve where there is no network.
    agent = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={choice.world_size}"]
    # These two are ours: the agent would give ranks half a minute to finish a step and save, and then fail.
    # One that is ignored, as by nohup, is no reason to end.
    ends = [n for n in _ENDS if signal.getsignal(n) != signal.SIG_IGN]
    agent.append(f"--signals-to-handle={','.join(n.name for n in ends)}")
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if not _reaches_ranks(number):
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    for attempt in range(restarts + 1):
        os.environ[flags.RESTARTS] = str(attempt)
        resumed = ["resume=true", f"out={_quoted(out)}"] if attempt and go_on(out) else []
        code, final = _run_agent([*agent, script, *arguments, *resumed], positions, program)
        if code == 0 or final or asked:
            return code
        if attempt < restarts:
            print(f"hsap: restart {attempt + 1} of {restarts} (guard.restarts)", file=sys.stderr, flush=True)
    return code


def _run_agent(arguments: list[str], positions: Shared, program: str) -> tuple[int, bool]:
    """Run the agent once: the exit code, and whether another attempt would end the same way."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_agent

    from hsap.train.hang.processes import ending, oom_kills
    from hsap.train.hang.sight import where

    positions.memory[:] = bytes(len(positions.memory))
    kills = oom_kills()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _ENDS}
    try:
        run_agent(arguments)
        return 0, True
    except ChildFailedError as error:
        failures = error.failures.values()
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        told = f"ended by {name}, for which no step is finished and saved; SIGTERM is the signal that asks for that"
        print(f"{program}: {told}", file=sys.stderr, flush=True)
        return 128 + error.sigval, True
    finally:
        # The agent's own raise an error wherever they come; until it runs again there are no ranks to end.
        for number, handler in before.items():
            signal.signal(number, handler)
    # What a rank has said tells more than how it, or another, was ended then.
    told = [f for f in failures if f.exitcode > 0 and isinstance(f.error_file_data.get("message"), dict)]
    if told:
        first = min(told, key=lambda f: f.timestamp)
        return first.exitcode, bool(first.error_file_data["message"].get("extraInfo", {}).get("final"))
    # The agent ends the other ranks with SIGTERM, in the same second as often as not.
    first = min(failures, key=lambda f: (f.exitcode == -signal.SIGTERM, f.timestamp))
    if first.exitcode >= 0:
        return first.exitcode, False
    if -first.exitcode == signal.SIGINT:
        print(f"{program}: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT, True
    record = positions.record(first.local_rank).cast("q")
    told = f"rank {first.local_rank} {ending(-first.exitcode, oom_kills() - kills)}; it was {where(record)}"
    print(f"{program}: {told}.", file=sys.stderr, flush=True)
    return 128 - first.exitcode, False


def _quoted(text: str) -> str:
    """Spell a value so that Hydra takes it as it is."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _reaches_ranks(number: int) -> bool:
    """Send a signal on to the ranks, which know what to do with it; tells whether there are any yet."""
    import psutil

    # Each rank leads a session of its own; that is why a terminal's Ctrl-C doesn't reach it by itself.
    ranks = [child for child in psutil.Process().children() if _leads_session(child.pid)]
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    return bool(ranks)


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
