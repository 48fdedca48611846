"""Launch: a check in as many processes as train.py would train in, of the same configuration."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from hsap.checks.small import quiet, small
from hsap.ir.problem import Topology
from hsap.train import flags
from hsap.train.composing import choose, single
from hsap.train.config import TrainConfig, train_config
from hsap.train.launch import PATIENCE_BEFORE_S, PATIENCE_DURING_S, fail
from hsap.train.processes import Leave, Start, Train, be_alone, look_around, start_ranks

WHAT = ("leak", "parity")
OK, NOT_OK = 0, 1


@dataclass(frozen=True, slots=True)
class Check:
    """A check to be run. overrides: as of train.py; full: the batch as it is, not made small."""

    what: str
    overrides: tuple[str, ...]
    full: bool = False
    as_json: bool = False

    @property
    def program(self) -> str:
        """As its user calls it, before its messages."""
        return f"hsap check {self.what}"

    @property
    def made_small(self) -> bool:
        """Whether the batch is."""
        return self.what == "parity" and not self.full

    def to_arguments(self) -> list[str]:
        """As a rank's command line has it, which `rank_main` reads."""
        given = [flag for flag, on in (("--full", self.full), ("--json", self.as_json)) if on]
        return [*given, self.what, *self.overrides]


def configured(overrides: Sequence[str], made_small: bool = False) -> tuple[TrainConfig, Train | Start | Leave, str]:
    """Compose what is to be checked, and choose its processes; also what was made small, in words. ValueError as of
    train.py."""
    values, reduced = quiet(single("check", overrides)), ""
    choice = choose(values, look_around(os.environ))
    if made_small:
        group = Topology.parse(values["topology"] or f"{choice.world_size}x1").num_ranks
        values, reduced = small(values, choice.world_size, group)
    # Nothing is written there, and nothing may be.
    out = os.environ.get(flags.OUT) or os.path.join(tempfile.gettempdir(), f"hsap-check-{os.getpid()}")
    return train_config(values, choice.world_size, choice.device, out), choice, reduced


def run(asked: Check) -> int:
    """Run a check from where the user called it: as a rank of a launcher's, or by starting ranks. The exit code."""
    config, choice, reduced = configured(asked.overrides, asked.made_small)
    match choice:
        case Leave():
            return OK
        case Start():
            from hsap.train.inputs import check, prepare_data

            check(config)
            prepare_data(config)
            return start_ranks(choice, "-m", ["hsap.checks", *asked.to_arguments()], config.out, program=asked.program)
        case Train():
            return in_rank(asked, config, reduced)


def in_rank(asked: Check, config: TrainConfig, reduced: str) -> int:
    """Run a check as one rank of its world: the same exit code on all."""
    os.environ["DS_ACCELERATOR"] = config.engine.device or "cpu"
    if "RANK" not in os.environ:
        be_alone()
    import torch
    import torch.distributed as dist

    from hsap.checks import leak, parity
    from hsap.train.engine import build, join, leave
    from hsap.train.inputs import read_inputs
    from hsap.train.run import Trainer

    inputs = read_inputs(config)
    engine = build(config, inputs.model, join(config))
    with Trainer(config, inputs, engine) as trainer:
        if asked.what == "leak":
            reports = leak.first_leaks(trainer)
            ok = all(report.ok for report in reports)
            if dist.get_rank() == 0:
                leak.tell(reports, asked.as_json)
        else:
            report = parity.check_parity(trainer, reduced)
            agreed = torch.tensor(report is None or report.ok, dtype=torch.int32, device=engine.device)
            dist.all_reduce(agreed, dist.ReduceOp.MIN)
            ok = bool(agreed)
            if report is not None:
                parity.tell(report, asked.as_json)
    dist.barrier()  # told before any rank ends with an error, at which a launcher ends them all
    leave(engine)
    return OK if ok else NOT_OK


def rank_main(arguments: Sequence[str]) -> None:
    """Run one rank that `run` has started: ends the process."""
    rank, patience_s = int(os.environ.get("RANK", "0")), PATIENCE_BEFORE_S
    parser = argparse.ArgumentParser("hsap check", add_help=False)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    asked = Check(given.what, tuple(given.overrides), given.full, given.json)
    try:
        config, _, reduced = configured(asked.overrides, asked.made_small)
        patience_s = PATIENCE_DURING_S
        code = in_rank(asked, config, reduced)
    except Exception as error:
        fail(error, rank, patience_s, asked.program)
    sys.exit(code)
