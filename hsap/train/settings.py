"""Settings: the whole configuration of a run as a file in its folder, which train.py can read again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsap.train.told import written


def write_down(
    values: Mapping[str, object], found: Mapping[str, object], arguments: Sequence[str], config_dir: Path
) -> str:
    """Write a composed configuration down as YAML, beneath the arguments it was composed of.

    found: what was settled since, like the topology, by key. config_dir: configs/, for what Hydra itself is told there;
    with that in the file, `train.py --config-path=FOLDER --config-name=config` reads it in place of configs/.
    """
    from omegaconf import OmegaConf

    ours: Any = OmegaConf.to_container(OmegaConf.load(config_dir / "config.yaml"), resolve=False)
    hydras = [entry for entry in ours["defaults"] if isinstance(entry, dict) and "hydra/" in next(iter(entry))]
    whole = {"defaults": ["_self_", *hydras], **values, **found, "resume": False, "hydra": ours["hydra"]}
    given = map(_readable, shlex.join(["train.py", *arguments]).splitlines())
    lines = [
        "The configuration of this run, written as it began. The command:",
        *given,
        "The same again, FOLDER being this one's absolute path (resume=true in place of out= goes on with this one):",
        "train.py --config-path=FOLDER --config-name=config out=ANOTHER",
    ]
    return "".join(f"# {line}\n" for line in lines) + OmegaConf.to_yaml(whole)


def _readable(line: str) -> str:
    """Escape what YAML refuses even in a comment, and what no file can hold, like bytes that aren't UTF-8."""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line)


def keep(out: Path, text: str) -> None:
    """Make `text` OUT/config.yaml; what earlier legs of a resumed run had there stays, as config.1.yaml and so on.

    ValueError where the disk is full, or the folder can't be written to; what was there is untouched then.
    """
    path = out / "config.yaml"
    with written(path):
        out.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        fresh = out / ".config.yaml"
        fresh.write_text(text, encoding="utf-8")
        if path.exists():
            number = 1
            while (out / f"config.{number}.yaml").exists():
                number += 1
            path.rename(out / f"config.{number}.yaml")
        fresh.rename(path)
