"""From the command line to the training loop in the right processes: compose, check, start ranks or train."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from hsap.launched import Place
from hsap.train import flags, restarts
from hsap.train.composing import choose, composed
from hsap.train.config import TrainConfig, train_config
from hsap.train.overrides import rewrite, wants_multirun
from hsap.train.processes import Leave, Start, Train, be_alone, look_around, start_ranks
from hsap.train.settings import write_down
from hsap.train.sweep import Job, exit_code, table
from hsap.train.told import PROGRAM, is_echo, tell

# A rank other than 0 waits this long with its message: rank 0 says the same, once, where all fail alike, and the
# launcher then ends the rest. Before training all ranks decide from the same values, so that is certain; during
# training it isn't.
PATIENCE_BEFORE_S = 60.0
PATIENCE_DURING_S = 10.0
_PRECEDENCE_S = 0.5
_NOT_OURS = (
    "guard.restarts={}: these ranks were started by a launcher, and only it can start them again (torchrun: "
    "--max-restarts; SLURM: launch/slurm.sbatch requeues); they then go on by themselves. Leave guard.restarts out, or "
    "start with plain python"
)


def main(config_dir: Path) -> None:
    """Run train.py: ends the process with a non-zero code, and one paragraph from rank 0, where anything fails.

    config_dir: absolute path of the Hydra configuration.
    """
    arguments = rewrite(sys.argv[1:])
    rank = 0
    try:
        place = Place.of(os.environ)
        rank = place.rank
        if wants_multirun(arguments) and _leaves_sweep_to_another(place):
            return
        task = composed(config_dir, arguments)
        if task.values is None:
            _end_sweep(task.jobs)
            return
        around = look_around(os.environ)
        choice = choose(task.values, around)
        config = train_config(task.values, choice.world_size, choice.device, _out(task.values, choice.world_size))
        if isinstance(choice, Train) and config.guard.restarts and not around.started:
            if choice.world_size > 1:
                raise ValueError(_NOT_OURS.format(config.guard.restarts))
            choice = Start(choice.device, 1)
        if isinstance(choice, Start):
            from hsap.train.inputs import check, prepare_data

            check(config)
            prepare_data(config)
    except Exception as error:
        fail(error, rank, PATIENCE_BEFORE_S)
    match choice:
        case Leave():
            return
        case Start():
            script, again = os.path.abspath(sys.argv[0]), config.guard.restarts
            try:
                code = start_ranks(choice, script, arguments, config.out, program=PROGRAM, restarts=again)
            except Exception as error:
                fail(error, rank, PATIENCE_BEFORE_S)
            sys.exit(code)
        case Train():
            settings = partial(write_down, task.values, arguments=arguments, config_dir=config_dir)
            _train(config, task.values, around.rank, settings)


def _train(
    config: TrainConfig, values: Mapping[str, object], rank: int, settings: Callable[[Mapping[str, object]], str]
) -> None:
    # DeepSpeed looks for accelerators when first imported; told which one, it neither guesses nor warns.
    assert config.engine.device is not None, "settled before"
    os.environ["DS_ACCELERATOR"] = config.engine.device
    if "RANK" not in os.environ:
        be_alone()
    patience_s = config.guard.start_timeout_s
    try:
        with _agreed(config.out, rank, config.world_size, patience_s) as (out, goes_on):
            from hsap.train.run import run

            found = {"topology": config.topology, "out": out}
            if goes_on:
                values = {**values, "out": out, "resume": True}
            config = train_config(values, config.world_size, config.engine.device, out)
            run(config, lambda changed: settings({**found, **changed}))
    except Exception as error:
        fail(error, rank, PATIENCE_DURING_S)


def _leaves_sweep_to_another(place: Place) -> bool:
    """Tell whether another rank runs the sweep: jobs of a sweep start their own ranks, so one process is enough."""
    if place.world_size != place.local_world_size:
        raise ValueError(
            f"--multirun starts the ranks of its jobs on one machine, but was itself started as {place.world_size} "
            f"ranks over several; start it with plain python on one node, or start each topology by itself."
        )
    return place.rank != 0


def _end_sweep(jobs: list[Job]) -> None:
    if jobs:
        print(table(jobs), flush=True)
        if code := exit_code(jobs):
            sys.exit(code)


def _out(values: Mapping[str, object], world_size: int) -> str:
    """Directory of the run: inherited, else as configured, else named after the time and the topology."""
    topology = values.get("topology") or f"{world_size}x1"
    earlier = restarts.earlier_out(os.environ)
    default = earlier or f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}-{topology}"
    return os.environ.get(flags.OUT) or str(values.get("out") or default)


@contextmanager
def _agreed(out: str, rank: int, world_size: int, patience_s: float | None) -> Iterator[tuple[str, bool]]:
    """Give all ranks rank 0's directory, and whether they go on with what an earlier attempt of this job left there.

    Ranks that a launcher started may read the clock in different seconds. Uses the launcher's own store; torch shares
    it with the process group made later, as long as it is kept until then.
    """
    if os.environ.get(flags.OUT):
        yield out, False  # who started these ranks has settled both
        return
    restarted = rank == 0 and restarts.is_restart(os.environ) and restarts.is_marked(out, os.environ)
    goes_on = restarted and restarts.go_on(out)
    store = None
    if world_size > 1:
        from hsap.train.hang.beats import meet

        store = meet(rank, world_size, patience_s)
        if rank == 0:
            store.set("hsap/out", json.dumps([out, restarted, goes_on]))
        out, restarted, goes_on = json.loads(store.get("hsap/out"))
    if restarted:
        os.environ[flags.RESTARTS] = "1"
    yield out, goes_on


def fail(error: Exception, rank: int, patience_s: float, program: str = PROGRAM) -> NoReturn:
    """Say what went wrong, once for all ranks, and end this process with exit code 1.

    Errors that HSAP raised on purpose, and Hydra's, are one paragraph; all else, and everything with HSAP_TRACEBACK=1,
    is a traceback. A rank that only saw its peer vanish says which one, and where it was, unless the launcher or the
    peer itself does. Before ranks have met, others than rank 0 wait with their message.
    os._exit, because threads and process groups that wait for other ranks must not keep a failed rank alive.
    """
    # Only a process that trains has loaded it.
    module = sys.modules.get("hsap.train.hang.watch")
    watch, echo = module.current() if module else None, is_echo(error)
    if watch is None and (rank != 0 or echo):
        time.sleep(patience_s)
    elif watch is not None and echo:
        watch.explain(patience_s)
    message = is_message(error)
    if message and os.environ.get(flags.TRACEBACK) != "1":
        text = f"{_paragraph(error)} ({flags.TRACEBACK}=1 shows the traceback.)"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    if watch is not None:
        # Where all fail alike, rank 0 is to say so.
        time.sleep(_PRECEDENCE_S if rank else 0)
        if not watch.claim(text):
            os._exit(1)
    tell(text, rank, final=message, amid=watch is not None, program=program)
    os._exit(1)


def is_message(error: Exception) -> bool:
    """Tell whether an error is a paragraph for the user, one that HSAP or Hydra raised on purpose."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return isinstance(error, (ValueError, FileNotFoundError)) and raised_in.split(".")[0] == "hsap"


def _paragraph(error: Exception) -> str:
    # Hydra ends its message on an unknown choice with a list of places that helps nobody who mistyped a name.
    return " ".join(str(error).split("Config search path:")[0].split())
