"""What goes wrong while data are prepared: a full disk, two at a time, a source that changes, Ctrl-C."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hsap import files
from hsap.cli import main
from hsap.data import prepared
from hsap.data.prepared import shards
from tests.data.test_prepared import ROOT, TOKENIZER, chat, contents, settings, wait_for

BESIDE = {"text": "A whale.", **chat("Who?", "Ishmael.")}


@pytest.fixture
def data(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": f"whale {i}"}) + "\n" for i in range(9)))
    return settings(tmp_path / "d.jsonl")


def test_rows_of_which_only_a_part_is_trained_are_told_and_no_fault(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text(json.dumps(BESIDE) + "\n" + json.dumps({"text": ""}) + "\n")
    command = ["prepare", str(tmp_path / "d.jsonl"), "-o", str(tmp_path / "out"), "--tokenizer", TOKENIZER]
    assert main([*command, "--workers", "1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "left out: 1 1 no text and no tokens" in told and "trained only in part: 1 1 " in told
    left_out = prepared.read_index(tmp_path / "out").left_out
    assert [*left_out.notes.values()] == [1] and "1 trained only in part: 1 for " in left_out.told()


@pytest.mark.parametrize("when", ["tokens", "index"])
def test_a_full_disk_is_told_and_the_same_command_goes_on(data, tmp_path, monkeypatch, capsys, when):
    expected = prepared.prepare(data, tmp_path / "expected")

    def full(file):
        if file == opened[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = []
    name = {"tokens": "00000.tokens", "index": ".prepared.json"}[when]

    def watched(path, *arguments, **options):
        file = open(path, *arguments, **options)  # noqa: SIM115
        if Path(path).name == name:
            opened.append(file.fileno())
        return file

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", watched, raising=False)
        patch.setattr(os, "fsync", lambda file: full(file) if opened else None)
        assert main(["prepare", data.path, "--tokenizer", TOKENIZER, "-o", str(tmp_path / "out"), "--seed", "0"])
    told = f"out/{name} can't be written (No space left on device); make room"
    assert told in capsys.readouterr().err
    assert prepared.prepare(data, tmp_path / "out").content == expected.content


@pytest.mark.parametrize("finished", ["before the file is opened", "before it is locked"])
def test_data_that_another_process_finishes_meanwhile_are_left_alone(data, tmp_path, monkeypatch, finished):
    """The second process looks before the first has finished, and has its lock afterwards."""
    lock, entered = shards.fcntl.flock, []

    def other():
        if not entered:
            entered.append(True)
            prepared.prepare(data, tmp_path / "out")

    def late(file, how):
        if finished == "before it is locked" and not entered:
            # The first one, whose unfinished.json this file is no longer.
            os.unlink(tmp_path / "out/unfinished.json")
            other()
        lock(file, how)

    def opened(path, *arguments, **options):
        if finished == "before the file is opened" and Path(path).name == "unfinished.json":
            other()
        return open(path, *arguments, **options)

    monkeypatch.setattr(shards.fcntl, "flock", late)
    monkeypatch.setattr(shards, "open", opened, raising=False)
    with pytest.raises(ValueError, match="out has just been prepared by another process; run the same command again"):
        prepared.prepare(data, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert prepared.prepare(data, tmp_path / "out").documents == 9
    assert {**before, **contents(tmp_path / "out")} == before and len(contents(tmp_path / "out")) == 5


def test_a_record_that_another_process_takes_away_first_is_no_fault(data, tmp_path, monkeypatch):
    prepared.prepare(data, tmp_path / "out")
    (tmp_path / "out/00000.json").write_text("{}")
    glob = Path.glob

    def late(path, pattern):
        found = [*glob(path, pattern)]
        for one in found:
            if one.name == "00000.json":
                one.unlink()
        return iter(found)

    monkeypatch.setattr(Path, "glob", late)
    assert prepared.prepare(data, tmp_path / "out").documents == 9


def test_a_source_that_changes_while_it_is_read_is_refused(data, tmp_path):
    def change(documents, tokens):
        if documents:
            with open(data.path, "a") as file:
                file.write(json.dumps({"text": "more"}) + "\n")

    with pytest.raises(ValueError, match=r"d.jsonl has changed while it was read, .*; remove .*out, and run the same"):
        prepared.prepare(data, tmp_path / "out", progress=change)
    with pytest.raises(ValueError, match="holds no finished prepared data"):
        prepared.open_store(tmp_path / "out")


def test_data_that_are_moved_while_they_are_read_are_told(data, tmp_path):
    prepared.prepare(data, tmp_path / "out")
    store = prepared.open_store(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    for read in (lambda: store.tokens[:3], lambda: store.ids[0]):
        with pytest.raises(ValueError, match=r"out/00000\..* was there when the data were opened, and can't be read"):
            read()


def test_a_terminal_without_these_characters_is_no_fault(data, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["data", data.path, "--tokenizer", TOKENIZER, "--packs", "1"]) == 0
    assert rb"\u27e6whale 0\u2039</s>\u203a\u27e7" in written.getvalue()


COMMAND = (
    # What a shell starts in the background ignores SIGINT, and so would this.
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from hsap.cli import main;"
    "from hsap.data.prepared import making; usual = making.prepare.__defaults__;"
    "making.prepare.__defaults__ = tuple(900 if one == making.SHARD_TOKENS else one for one in usual);"
    "making.BLOCK_DOCUMENTS = 8;"
    "sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_the_same_command_goes_on(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": "whales " * 300}) + "\n" for _ in range(30_000)))
    command = [sys.executable, "-c", COMMAND, "prepare", "d.jsonl", "-o", "out", "--tokenizer", TOKENIZER]
    running = subprocess.Popen(
        [*command, "--workers", "2"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(tmp_path / "out/00001.json")
    os.killpg(running.pid, signal.SIGINT)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 130 and told.splitlines()[-1] == "hsap prepare: interrupted"
    assert "Traceback" not in told
    assert not (tmp_path / "out/prepared.json").exists() and (tmp_path / "out/00001.json").exists()
