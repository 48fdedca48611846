"""Composing: from train.py's overrides to the values of a configuration, as Hydra puts them together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsap import clusters
from hsap.ir.check import Refused, printable
from hsap.keys import unknown
from hsap.train.config import KEYS
from hsap.train.overrides import GROUPS, know_project, rewrite, wants_multirun
from hsap.train.processes import Leave, Start, Surroundings, Train, decide
from hsap.train.sweep import Job

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


def composed(config_dir: Path, arguments: list[str]) -> Task:
    """Hand rewritten arguments to Hydra: `values` is then set, or Hydra has run a sweep or printed what was asked.

    config_dir: absolute. ValueError, or an error of Hydra's, for arguments that don't fit.
    """
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


def single(program: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Compose one configuration for a program that takes train.py's overrides, from the checkout's configs/.

    ValueError, or an error of Hydra's, for overrides that don't fit; Refused where there is no checkout.
    """
    folder = clusters.FOLDER.parent.resolve()
    if not (folder / "config.yaml").is_file():
        raise Refused(
            f"{program}: this is an installed package, and configurations lie beside train.py; run it from a checkout "
            "(pip install -e .)"
        )
    arguments = rewrite(overrides)
    if wants_multirun(arguments):
        raise Refused(f"{program}: --multirun is for training; name one configuration at a time")
    values = composed(folder, arguments).values
    if values is None:
        raise Refused(f"{program}: give overrides alone, KEY=VALUE, and none of Hydra's flags")
    return values


def choose(values: Mapping[str, Any], around: Surroundings) -> Train | Start | Leave:
    """Choose the processes of a composed configuration; ValueError as of `decide`."""
    engine = values.get("engine")
    return decide(values.get("topology"), engine.get("device") if isinstance(engine, Mapping) else None, around)


def _no_file(config_dir: Path, arguments: list[str]) -> str:
    """Say which arguments give a group of keys what is no name of a file: null, a number, true or false."""
    named = [a for a in arguments if _NO_NAME.fullmatch(a)]
    folders = [config_dir / argument.split("=")[0] for argument in named]
    files = (f"{folder.name}: {', '.join(sorted(f.stem for f in folder.glob('*.yaml')))}" for folder in folders)
    return (
        f"{' '.join(named or arguments)}: expected the name of a file, {'; '.join(files)}; leave it out for the default"
    )
