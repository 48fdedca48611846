"""Files that a command is asked to read, or to write: refused before anything takes long, not after."""

from __future__ import annotations

import re
from pathlib import Path

from hsap.ir.listing import Listing
from hsap.ir.plan import Plan
from hsap.ir.reader import parse


def check_writable(flag: str, name: str) -> None:
    """Refuse a name that is none, a folder, or in a folder that isn't there; ValueError names the flag."""
    if not name:
        raise ValueError(f"{flag}: an empty name is no file; give a path")
    path = Path(name).absolute()
    if path.is_dir():
        raise ValueError(f"{flag} {name}: that is a folder; give the file's own name, too")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {name}: its folder isn't there; make it, or choose another")


def read_plan(path: str) -> Plan | Listing:
    """Read a stored plan, a plan's text or a listing; ValueError names the file."""
    data = Path(path).read_bytes()
    try:
        return Plan.from_bytes(data) if re.match(rb"hsap-plan-\d", data) else parse(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path}: neither a stored plan nor text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
