"""Cluster files: figures of machines as YAML, one file a cluster, read into a `Cluster`.

Those of the package lie in configs/cluster, where Hydra finds them as a group too; a user's own may lie anywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from hsap.ir.check import Refused, one_line, shown, whole
from hsap.ir.cluster import Cluster

FOLDER = Path(__file__).resolve().parent / "configs" / "cluster"
"""A link to the repository's configs/cluster; in an installed package the files themselves."""
CHOSEN_LATER = "auto"
"""The file of that name leaves the choice to who knows the device."""

_FIELDS = {field.name: field for field in fields(Cluster)}
_REQUIRED = (
    *("ranks_per_node", "intra_bytes_per_s", "inter_bytes_per_s", "intra_latency_s", "inter_latency_s", "flops_per_s"),
    *("memory_bytes_per_s", "capacity_bytes", "kernel_overhead_s", "slice_overhead_s", "attend_efficiency"),
    *("attend_grad_efficiency", "tile_tokens"),
)
"""Fields for which no default would be right on another machine."""


def names() -> tuple[str, ...]:
    """Names of the clusters that come with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != CHOSEN_LATER))


def read(name: str, nodes: int | None = None) -> Cluster:
    """Read a cluster by name, or from a YAML file if `name` is a path that ends with .yaml or .yml.

    nodes: how many there are (None: as the file says). ValueError names the file and the field, and what to do.
    """
    if not isinstance(name, str) or not name.endswith((".yaml", ".yml")):
        known = names()
        if not isinstance(name, str) or name not in known:
            raise Refused(
                f"cluster: unknown preset {shown(name)}; known ones are {', '.join(known)}; a file of your own is "
                "named by its path, which ends with .yaml (`hsap bench calibrate` writes one)"
            )
        path = FOLDER / f"{name}.yaml"
    else:
        path = Path(name)
    cluster = from_mapping(load_yaml(path, "cluster"), str(path), path.stem)
    return cluster if nodes is None else replace(cluster, num_nodes=whole("cluster: nodes", nodes))


def from_mapping(values: object, where: str, name: str | None = None) -> Cluster:
    """Make a cluster of fields as YAML has them. where: begins every complaint. name: if the values have none."""
    if not isinstance(values, Mapping):
        raise Refused(f"{where}: it holds {shown(values)}; give its fields, a line each, as in ranks_per_node: 8")
    for key in values:
        if key not in _FIELDS:
            close = difflib.get_close_matches(str(key), _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known ones are {', '.join(_FIELDS)}"
            raise Refused(f"{where}: {shown(key)} is no field of a cluster; {hint}")
    if missing := [key for key in _REQUIRED if values.get(key) is None]:
        raise Refused(f"{where}: {', '.join(missing)} must be given; see configs/cluster/dgx-a100.yaml for an example")
    called = values.get("name")
    if isinstance(called, str) and not (called.isprintable() and len(called) <= 64):
        raise Refused(f"{where}: name is {shown(called)}; give a word or two, which are printed")
    # null means what leaving out means, so that an override can take a field back.
    given: dict[str, Any] = {key: _read_number(key, value) for key, value in values.items() if value is not None}
    try:
        return Cluster(**({"name": name} if name else {}) | given)
    except Refused as error:
        raise Refused(f"{where}: {error}") from None


def write(cluster: Cluster, path: str | Path, comments: Mapping[str, str], head: str) -> None:
    """Write the file that `read` reads: every field that isn't its default or is required, with a comment each."""
    lines = [f"# {line}" for line in head.splitlines()]
    for key, field in _FIELDS.items():
        value = getattr(cluster, key)
        if key not in _REQUIRED and key != "name" and field.default is not MISSING and value == field.default:
            continue
        if key in comments:
            lines.append(f"# {comments[key]}")
        lines.append(f"{key}: {_spelled(value)}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_yaml(path: Path, where: str) -> object:
    """Read a YAML file as plain values. where: begins every complaint. ValueError: none, or a key given twice."""
    # Loaded when first used: who plans for the default nodes needs no YAML.
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        twice = _named_twice(yaml.compose(text, yaml.SafeLoader))
        values = yaml.safe_load(text)
    except OSError as error:
        raise Refused(f"{where}: {path}: {error.strerror}; check the path") from None
    # A tag on what isn't of its kind, as in !!bool x, comes as whatever error that makes.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Refused(f"{where}: {path}: not YAML: {one_line(error)}; give `field: value` lines") from None
    if twice:
        raise Refused(f"{where}: {path}: {one_line(', '.join(twice))} given twice; remove one of the lines")
    return values


def _named_twice(node: Any) -> list[str]:
    """Keys that a mapping has more than once, of which YAML's reader would keep the last."""
    keys = [key.value for key, _ in node.value] if node is not None and node.id == "mapping" else []
    return sorted({str(key) for key in keys if keys.count(key) > 1})


def _read_number(key: str, value: object) -> object:
    """Take 25e9 for the number it is: YAML 1.1 wants a point and a sign, as in 25.0e+9, and gives a text otherwise."""
    if isinstance(value, str) and "float" in str(_FIELDS[key].type):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _spelled(value: object) -> str:
    """Spell a value so that YAML reads the same back."""
    if isinstance(value, tuple):
        return f"[{', '.join(_spelled(part) for part in value)}]"
    if isinstance(value, float) and value.is_integer() and value < 1e7:
        return f"{value:.1f}"  # a number of cores is exact
    if isinstance(value, float):
        mantissa, exponent = f"{value:.4e}".split("e")
        mantissa = mantissa.rstrip("0")
        mantissa += "0" if mantissa.endswith(".") else ""
        return mantissa if int(exponent) == 0 else f"{mantissa}e{int(exponent):+d}"
    return str(value)


# The public spelling of `read`, bound here: a value of ir knows no files, nor who reads them.
Cluster.preset = staticmethod(read)
