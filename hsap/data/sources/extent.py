"""Extent: which files a source reads, and a fingerprint of them that is taken without reading any."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hsap.data.sources.several import DataSet
from hsap.data.sources.text import LEFT_OUT

_BESIDE = {"megatron": (".bin",), "datatrove": (".index", ".loss")}
"""Files that belong to those that are listed; Megatron's has the index's name with another suffix."""


def fingerprint(source: DataSet) -> dict[str, Any]:
    """Describe the files of a source: how many, their bytes, and sha256 over names, sizes and times of change."""
    digest, count, num_bytes = hashlib.sha256(), 0, 0
    for name, size, changed in _stated(source):
        digest.update(f"{name}\0{size}\0{changed}\n".encode("utf-8", "surrogateescape"))
        count, num_bytes = count + 1, num_bytes + size
    return {"files": count, "bytes": num_bytes, "sha256": digest.hexdigest()}


def _stated(source: DataSet) -> Iterator[tuple[str, int, int]]:
    for format, file in ((part.format, file) for part in source.parts for file in part.files):
        if not isinstance(file, Path):  # an object of Hugging Face's library
            yield str(getattr(file, "_fingerprint", "")), len(file) if hasattr(file, "__len__") else 0, 0
            continue
        for path, name in _files(file, format):
            # Of a tree links are left out, and may lead nowhere.
            found = path.stat() if path.exists() else path.lstat()
            yield name, found.st_size, found.st_mtime_ns


def _files(file: Path, format: str) -> Iterator[tuple[Path, str]]:
    """Walk the files that one entry of a source stands for, with names that tell those in folders apart."""
    if format == "mds":
        file = file.parent
    if file.is_dir():
        for root, folders, names in os.walk(file):
            folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
            paths = [Path(root, name) for name in sorted(names) if name not in LEFT_OUT]
            # A file that moves to another folder becomes part of another place, or of another document.
            above = file.parent if format == "source_trees" else file
            yield from ((path, str(path.relative_to(above))) for path in paths)
        return
    yield file, file.name
    for suffix in _BESIDE.get(format, ()):
        beside = file.with_suffix(suffix) if format == "megatron" else file.with_name(file.name + suffix)
        if beside.is_file():
            yield beside, beside.name
