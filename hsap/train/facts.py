"""Facts: what a run is by its settings and by the packages that compute it, JSON values by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict


def versions() -> dict[str, str]:
    """Of what computes: packages whose versions must be the same on all ranks."""
    from importlib.metadata import version

    names = ("torch", "numpy", "deepspeed", "numba", "safetensors")
    return {f"version of {name}": version(name) for name in names}


def settings_of(config) -> dict[str, object]:
    """A configuration as facts for `check_job`, by dotted name."""
    return dict(_flat("", json.loads(json.dumps(asdict(config), default=_plain))))


def _flat(prefix: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)
