"""From the command line to the training loop in the right processes: compose, check, start ranks or train."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hsap.ir.check import printable
from hsap.keys import unknown
from hsap.launched import Place
from hsap.train import flags
from hsap.train.config import KEYS, TrainConfig, train_config
from hsap.train.overrides import GROUPS, know_project, rewrite, wants_multirun
from hsap.train.processes import Leave, Start, Train, alone_environment, decide, look_around, start_ranks
from hsap.train.settings import write_down
from hsap.train.sweep import Job, exit_code, table

# A rank other than 0 waits this long with its message: rank 0 says the same, once, where all fail alike, and the
# launcher then ends the rest. Before training all ranks decide from the same values, so that is certain; during
# training it isn't.
_PATIENCE_BEFORE_S = 60.0
_PATIENCE_DURING_S = 10.0
_NO_NAME = re.compile(rf"({'|'.join(GROUPS)})=(null|true|false|-?\d[\d.]*)", re.IGNORECASE)


class Task:
    """What Hydra calls: keeps the composed configuration of a single run, or the finished jobs of a sweep."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] | None = None
        self.jobs: list[Job] = []

    def __call__(self, config) -> None:
        from omegaconf import OmegaConf

        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        self.values = values


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
        task = _compose(config_dir, arguments)
        if task.values is None:
            _end_sweep(task.jobs)
            return
        around = look_around(os.environ)
        engine = task.values.get("engine")
        device = engine.get("device") if isinstance(engine, Mapping) else None
        choice = decide(task.values.get("topology"), device, around)
        config = train_config(task.values, choice.world_size, choice.device, _out(task.values, choice.world_size))
        if isinstance(choice, Start):
            from hsap.train.inputs import check, prepare_data

            check(config)
            prepare_data(config)
    except Exception as error:
        fail(error, rank, _PATIENCE_BEFORE_S)
    match choice:
        case Leave():
            return
        case Start():
            code = start_ranks(choice, os.path.abspath(sys.argv[0]), arguments, config.out)
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
        os.environ.update(alone_environment())
    try:
        with _agreed_out(config.out, rank, config.world_size) as out:
            from hsap.train.run import run

            found = {"topology": config.topology, "out": out}
            run(train_config(values, config.world_size, config.engine.device, out), settings(found))
    except Exception as error:
        fail(error, rank, _PATIENCE_DURING_S)


def _compose(config_dir: Path, arguments: list[str]) -> Task:
    """Hand the arguments to Hydra: afterwards `values` is set, or Hydra has run a sweep or printed what was asked."""
    import hydra
    from hydra.errors import ConfigCompositionException, OverrideParseException

    task = Task()
    know_project(config_dir.parent)
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    # With this set Hydra raises; without, it prints on every rank and exits.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir), config_name="config")(task)()
    except OverrideParseException as error:
        raise ValueError(
            f"{printable(error)}. Without quotes a value is ASCII letters, digits and -_./:@%+*; others stand in "
            f"quotes within quotes, like \"data.path='ä(1).jsonl'\""
        ) from error
    except ConfigCompositionException as error:
        # Hydra would have a plus put before a key that is misspelt.
        if (missing := re.match(r"Could not override '(\w+)'", str(error))) and missing[1] not in KEYS:
            raise unknown("", missing[1], {*KEYS, *GROUPS}) from None
        raise
    except ValueError as error:
        if not str(error).startswith("Config group override must be"):
            raise
        raise ValueError(_no_file(config_dir, arguments)) from error
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return task


def _no_file(config_dir: Path, arguments: list[str]) -> str:
    """Say which arguments give a group of keys what is no name of a file: null, a number, true or false."""
    named = [a for a in arguments if _NO_NAME.fullmatch(a)]
    folders = [config_dir / argument.split("=")[0] for argument in named]
    files = (f"{folder.name}: {', '.join(sorted(f.stem for f in folder.glob('*.yaml')))}" for folder in folders)
    return (
        f"{' '.join(named or arguments)}: expected the name of a file, {'; '.join(files)}; leave it out for the default"
    )


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
    default = f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}-{topology}"
    return os.environ.get(flags.OUT) or str(values.get("out") or default)


@contextmanager
def _agreed_out(out: str, rank: int, world_size: int) -> Iterator[str]:
    """Give all ranks rank 0's directory: ranks that a launcher started may read the clock in different seconds.

    Uses the launcher's own store; torch shares it with the process group made later, as long as it is kept until then.
    """
    if world_size == 1 or os.environ.get(flags.OUT):
        yield out
        return
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size)))
    if rank == 0:
        store.set("hsap/out", out)
    yield store.get("hsap/out").decode()


def fail(error: Exception, rank: int, patience_s: float) -> NoReturn:
    """Say what went wrong, once for all ranks, and end this process with exit code 1.

    Errors that HSAP raised on purpose, and Hydra's, are one paragraph; all else, and everything with HSAP_TRACEBACK=1,
    is a traceback. A rank that only saw its peer vanish waits as well: the peer, or the launcher, knows the reason.
    os._exit, because threads and process groups that wait for other ranks must not keep a failed rank alive.
    """
    if rank != 0 or _is_echo(error):
        time.sleep(patience_s)
    if _is_message(error) and os.environ.get(flags.TRACEBACK) != "1":
        text = f"{_paragraph(error)} ({flags.TRACEBACK}=1 shows the traceback.)"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    prefix = "train.py: " if rank == 0 else f"train.py: rank {rank}: "
    sys.stdout.flush()
    print(f"{prefix}{text}", file=sys.stderr, flush=True)
    _tell_agent(text)
    os._exit(1)


def _is_message(error: Exception) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return isinstance(error, (ValueError, FileNotFoundError)) and raised_in.split(".")[0] == "hsap"


def _is_echo(error: Exception) -> bool:
    return (
        isinstance(error, RuntimeError) and re.search(r"Connection (closed|reset)|Broken pipe", str(error)) is not None
    )


def _paragraph(error: Exception) -> str:
    # Hydra ends its message on an unknown choice with a list of places that helps nobody who mistyped a name.
    return " ".join(str(error).split("Config search path:")[0].split())


def _tell_agent(text: str) -> None:
    """Leave the message where torch's agent, started by the user, looks for it, so that its report shows it last."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
