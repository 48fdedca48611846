"""Hydra launcher that runs each job of a sweep in fresh processes, one job after the other.

Hydra finds it by its place, `hydra_plugins.*`, from a checkout and from an installed package; configs/config.yaml
chooses it. No postponed annotations here: Hydra runs a plugin before it is in sys.modules, where dataclass would look.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from hsap.train.sweep import Job, run_job, table


@dataclass
class RankLauncherConf:
    _target_: str = "hydra_plugins.hsap_launcher.launcher.RankLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="hsap", node=RankLauncherConf, provider="hsap")


class RankLauncher(Launcher):
    """Starts train.py once a job and adds each finished `Job` to the task's list."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.task = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        returns = []
        for index, overrides in enumerate(map(list, job_overrides), start=initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = index
            print(f"job {index}: {' '.join(filter_overrides(overrides))}", flush=True)
            job = self._run(config, overrides, index)
            self.task.jobs.append(job)
            if job.asked:
                print(table(self.task.jobs), flush=True)
                raise SystemExit(128 + job.asked)
            # Sweepers that search want a number, and a failed job must not end the sweep: it is as bad as can be.
            value = next((v for v in (job.eval_loss, job.loss) if v is not None), math.inf)
            worst = math.inf if job.exit_code else value
            returns.append(JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=worst))
        return returns

    def _run(self, config: DictConfig, overrides: list[str], index: int) -> Job:
        topology = str(config.topology or "1x1")
        out = Path(config.out or config.hydra.sweep.dir) / f"{index}-{topology}"
        return run_job(topology, str(config.planner.name), [*_config_flags(sys.argv[1:]), *overrides], out)


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """Keep the flags that say where the configuration lies: a job's overrides don't repeat them."""
    kept: list[str] = []
    names = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")
    for at, argument in enumerate(arguments):
        if argument in names:
            kept += arguments[at : at + 2]
        elif argument.startswith(tuple(f"{name}=" for name in names)):
            kept.append(argument)
    return kept
