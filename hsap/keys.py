"""Keys: fields of a configuration that say what they allow, and dataclasses read from plain mappings by these rules.

What is wrong gets one message in one style: `optim.lr=0: expected a number above 0.`
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Check = Callable[[Any], bool]
Config = TypeVar("Config", bound="DataclassInstance")


def rule(allowed: str, check: Check, optional: bool = False, default: object = MISSING) -> Any:
    """Describe a field: `check` accepts its value, `allowed` tells the user what is accepted; optional adds null."""
    if optional:
        allowed = f"{allowed}, or null"
    metadata = {"allowed": allowed, "check": lambda value: (optional and value is None) or check(value)}
    return field(default=default, metadata=metadata)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number that a float can hold, and no truth value."""
    if is_integer(value):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)


def integer(least: int, **more: Any) -> Any:
    """Describe a whole number."""
    return rule(f"a whole number of at least {least}", lambda v: is_integer(v) and v >= least, **more)


def number(allowed: str, check: Check, **more: Any) -> Any:
    """Describe a number that `check` accepts."""
    return rule(allowed, lambda v: is_number(v) and check(v), **more)


def choice(*names: object, **more: Any) -> Any:
    """Describe one of several values."""
    # `type` too, because True == 1: zero_stage=true is a mistake, not stage 1.
    return rule(
        "one of " + ", ".join(map(str, names)), lambda v: any(type(v) is type(n) and v == n for n in names), **more
    )


def text(allowed: str, **more: Any) -> Any:
    """Describe a word or words."""
    return rule(allowed, lambda v: isinstance(v, str) and bool(v.strip()), **more)


def flag(**more: Any) -> Any:
    """Describe a truth value."""
    return rule("true or false", lambda v: isinstance(v, bool), **more)


def check(config: DataclassInstance, prefix: str) -> None:
    """Refuse, by ValueError, a value that its field doesn't allow. prefix: of the keys, as in `model.`."""
    for described in fields(config):
        _check(described, prefix, getattr(config, described.name))


def read(kind: type[Config], prefix: str, section: Mapping[str, object], known: set[str] | None = None) -> Config:
    """Build `kind` from a section of the configuration; `known` are the names offered when a key is unknown.

    ValueError: an unknown or missing key, or a value that isn't allowed.
    """
    rules = {f.name: f for f in fields(kind)}
    for key in section:
        if key not in rules:
            raise unknown(prefix, str(key), known or set(rules))
    values = {}
    for name, described in rules.items():
        if name in section:
            _check(described, prefix, section[name])
            values[name] = _converted(described, section[name])
        elif described.default is MISSING:
            raise ValueError(f"{prefix}{name} is missing; set it to {described.metadata['allowed']}.")
    return kind(**values)


def unknown(prefix: str, key: str, known: set[str]) -> ValueError:
    """Make the error of a key that isn't there: it names those that are and, where there is one, the closest."""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean {prefix}{close[0]}?" if close else ""
    return ValueError(f"{prefix}{key}: no such key; known ones are {', '.join(sorted(known))}.{hint}")


def _check(described: Field[Any], prefix: str, value: object) -> None:
    if not described.metadata["check"](value):
        # YAML takes 1e-5 for a word.
        hint = " In YAML write 1.0e-5, not 1e-5." if isinstance(value, str) and "float" in described.type else ""
        raise ValueError(f"{prefix}{described.name}={value}: expected {described.metadata['allowed']}.{hint}")


def _converted(described: Field[Any], value: Any) -> Any:
    """Whole numbers are welcome where a float is meant (lr=1), and YAML knows no tuples."""
    if described.type.startswith("float") and value is not None:
        return float(value)
    return tuple(map(float, value)) if described.type.startswith("tuple[float") else value
