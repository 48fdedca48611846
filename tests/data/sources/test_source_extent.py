"""The fingerprint of a source's files: all that a walk reads counts, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from hsap.data import sources
from hsap.data.sources.extent import fingerprint
from hsap.data.sources.mixture import Mixture
from hsap.data.sources.several import Several

FILES = Path(__file__).parents[1] / "files"


def touch(path):
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("format", ["megatron", "datatrove", "mds", "jsonl"])
def test_every_file_of_a_format_counts(tmp_path, format):
    folder = shutil.copytree(FILES / format, tmp_path / format)
    path = next(iter(sorted(folder.glob("*.idx" if format == "megatron" else "*.ds"))), None) or folder
    if format == "mds":
        path = next(
            index.parent for index in sorted(folder.rglob("index.json")) if len(list(index.parent.iterdir())) > 1
        )
    if format == "jsonl":
        path = sorted(folder.iterdir())[0]
    before = fingerprint(sources.open(path))
    assert before == fingerprint(sources.open(path))
    stem = path.name.split(".")[0]
    read = [f for f in (path.rglob("*") if format == "mds" else path.parent.glob(f"{stem}.*")) if f.is_file()]
    read = [path] if format == "jsonl" else read
    assert before["files"] == len(read) and before["bytes"] == sum(file.stat().st_size for file in read)
    for file in read:
        seen = fingerprint(sources.open(path))
        touch(file)
        assert fingerprint(sources.open(path)) != seen, file
    (tmp_path / "beside.jsonl").write_text("{}")
    seen = fingerprint(sources.open(path))
    touch(tmp_path / "beside.jsonl")
    assert fingerprint(sources.open(path)) == seen


def test_all_parts_count(tmp_path):
    (tmp_path / "tree/.git").mkdir(parents=True)
    (tmp_path / "tree/a.py").write_text("a = 1\n")
    (tmp_path / "b.txt").write_text("b")
    names = [str(tmp_path / name) for name in ("tree", "b.txt")]

    def opened():
        parts = {name: sources.open(name) for name in names}
        return Several(parts), Mixture(parts, dict.fromkeys(names, 1))

    before = [fingerprint(one) for one in opened()]
    assert before[0] == before[1] and (before[0]["files"], before[0]["bytes"]) == (2, 7)
    (tmp_path / "tree/.git/index").write_text("changes with every look at it")
    assert [fingerprint(one) for one in opened()] == before
    touch(tmp_path / "tree/a.py")
    assert all(fingerprint(one)["sha256"] != seen["sha256"] for one, seen in zip(opened(), before))
