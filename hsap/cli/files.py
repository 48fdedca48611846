"""Files that a command is asked to write: refused before anything takes long, not after."""

from __future__ import annotations

from pathlib import Path


def check_writable(flag: str, name: str) -> None:
    """Refuse a name that is none, a folder, or in a folder that isn't there; ValueError names the flag."""
    if not name:
        raise ValueError(f"{flag}: an empty name is no file; give a path")
    path = Path(name).absolute()
    if path.is_dir():
        raise ValueError(f"{flag} {name}: that is a folder; give the file's own name, too")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {name}: its folder isn't there; make it, or choose another")
