"""The cache of prepared data: one process prepares, the others wait and map; what changes leads to another folder."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hsap.data import prepared, sources
from hsap.data.config import data_config
from hsap.data.prepared import cache, making
from hsap.data.read import read_store
from tests.data.test_prepared import ROOT, ROWS, TOKENIZER, chat, in_memory, same

LIMIT_S = 100


def settings(folder, rows=ROWS, **more):
    path = folder / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"path": str(path), "tokenizer": TOKENIZER, "chat_template": "chatml", "cache": str(folder / "cache")}
    return data_config({**given, **more})


def folders(data):
    return sorted(path.name for path in Path(data.cache).iterdir() if path.is_dir())


def test_the_cache_holds_what_is_read_into_memory_and_is_made_once(tmp_path, monkeypatch):
    data = settings(tmp_path)
    store, index = read_store(data, data.path, 7)
    expected, tally = in_memory(data)
    same(store, expected)
    whole, its_index = read_store(dataclasses.replace(data, cache=None), data.path, 7)
    same(whole, expected)
    assert whole.tokens.dtype == expected.tokens.dtype and type(whole.ids) is type(expected.ids)
    for one in (index, its_index):
        assert (one.left_out.told(), one.left_out.num_documents) == (tally.told(), tally.num_documents)
    assert index.content == its_index.content and index.recipe == its_index.recipe
    monkeypatch.setattr(cache, "prepare", lambda *_: pytest.fail("prepared again"))
    again, _ = read_store(data, data.path, 8)
    same(again, expected)
    assert len(folders(data)) == 1 and prepared.find_cached(data, data.path) is not None


def test_rows_that_are_trained_in_part_are_told_from_the_index(tmp_path):
    data = settings(tmp_path, [{"text": "a whale", **chat("Who?", "I.")}, {"text": "b"}], chat_template=None)
    told = in_memory(data)[1].told()
    assert "1 trained only in part" in told and read_store(data, data.path, 0)[1].left_out.told() == told


CHANGES = [{"loss": "all"}, {"chat_template": "llama2"}, {"add_eos": False}, {"chat_date": "2025-01-01"}]


@pytest.mark.parametrize("more", CHANGES, ids=lambda more: next(iter(more)))
def test_other_settings_lead_to_another_folder(tmp_path, more):
    data = settings(tmp_path)
    first = prepared.cached(data, data.path)
    assert prepared.find_cached(settings(tmp_path, **more), data.path) is None
    assert prepared.cached(settings(tmp_path, **more), data.path) != first


def test_changed_files_lead_to_another_folder_and_packing_doesn_t(tmp_path):
    data = settings(tmp_path)
    first = prepared.cached(data, data.path)
    assert prepared.cached(dataclasses.replace(data, pack_tokens=17, packing="concat"), data.path, 3) == first
    with open(data.path, "a") as file:
        file.write('{"text": "one more"}\n')
    store, _ = read_store(data, data.path, 0)
    same(store, in_memory(data)[0])
    os.utime(data.path, ns=(0, 0))
    assert prepared.find_cached(data, data.path) is None
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
    with open(tmp_path / "tokenizer.json", "a") as file:
        file.write(" ")
    prepared.cached(data, data.path)
    assert prepared.find_cached(settings(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")), data.path) is None
    (tmp_path / "elsewhere").mkdir()
    shutil.copy2(data.path, tmp_path / "elsewhere")
    assert prepared.find_cached(data, str(tmp_path / "elsewhere/rows.jsonl")) is None


def test_a_file_that_moves_within_a_tree_leads_to_another_folder(tmp_path):
    for name in ("a/1.py", "a/2.py", "b/3.py"):
        (tmp_path / "trees" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "trees" / name).write_text("x = 1\n")
    data = settings(tmp_path, path=str(tmp_path / "trees"), format="source_trees")
    prepared.cached(data, data.path)
    (tmp_path / "trees/a/2.py").rename(tmp_path / "trees/b/2.py")
    same(read_store(data, data.path, 0)[0], in_memory(data)[0])


def test_of_a_mixture_the_seed_and_the_order_of_its_data_sets_count(tmp_path):
    data = settings(tmp_path)
    other = str(tmp_path / "other.jsonl")
    Path(other).write_text('{"text": "a"}\n{"text": "b"}\n')
    for path in ({data.path: 2, other: 1}, {other: 1, data.path: 2}):
        for seed in (1, 2):
            store, _ = read_store(data, path, seed)
            same(store, read_store(dataclasses.replace(data, cache=None), path, seed)[0])
    assert len(folders(data)) == 4
    several = prepared.cached(data, [data.path, other], 1)
    assert prepared.cached(data, [data.path, other], 2) == several
    assert prepared.cached(data, [other, data.path], 2) != several


def test_other_code_prepares_anew(tmp_path, monkeypatch):
    data = settings(tmp_path)
    prepared.cached(data, data.path)
    monkeypatch.setattr(cache, "_code", lambda: "corrected")
    assert prepared.find_cached(data, data.path) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_is_full_or_read_only_is_told(tmp_path, monkeypatch, number):
    data = settings(tmp_path)

    def write(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("hsap.files.write", write)
    with pytest.raises(ValueError, match=r"data\.eval_path can't be kept in data\.cache=.*; make room, set") as error:
        prepared.cached(data, data.path, name="data.eval_path")
    assert os.strerror(number) in str(error.value) and "\n" not in str(error.value)
    monkeypatch.undo()
    same(read_store(data, data.path, 0)[0], in_memory(data)[0])


def test_a_cache_that_can_t_be_a_folder_is_told(tmp_path):
    data = settings(tmp_path, cache=str(tmp_path / "rows.jsonl" / "cache"))
    with pytest.raises(ValueError, match=r"data\.path can't be kept in data\.cache=.*Not a directory"):
        prepared.cached(data, data.path)
    inside = settings(tmp_path, path=str(tmp_path), format="source_tree")
    with pytest.raises(ValueError, match=r"lies inside .*; name one elsewhere \(in training: data.cache\)"):
        prepared.cached(inside, inside.path)


@pytest.mark.parametrize("cache", ["/proc/none/cache", "/proc/none/more/cache", "x" * 300], ids=lambda name: name[-9:])
def test_a_cache_whose_parents_can_t_be_made_is_told(tmp_path, cache):
    data = settings(tmp_path, cache=cache)
    with pytest.raises(ValueError, match=f"can't be kept in data.cache={cache} "):
        prepared.cached(data, data.path)


@pytest.mark.parametrize("which", ["rows", "tokenizer", "template"])
@pytest.mark.parametrize("when", ["looked at", "read"])
def test_what_changes_under_its_name_while_it_is_prepared_is_refused(tmp_path, monkeypatch, which, when):
    tokenizer, template = tmp_path / "tokenizer.json", tmp_path / "mine.jinja"
    shutil.copy(TOKENIZER, tokenizer)
    template.write_text((ROOT / "hsap/data/chat/templates/chatml.jinja").read_text())
    data = settings(tmp_path, tokenizer=str(tokenizer), chat_template=str(template))
    changed = {"rows": Path(data.path), "tokenizer": tokenizer, "template": template}[which]
    before, times = changed.read_bytes(), changed.stat()
    module, name = {"looked at": (cache, "_acquire"), "read": (making.Growing, "write")}[when]
    real = getattr(module, name)

    def change(*given):
        more = b'{"text": "one more"}\n' if which == "rows" else b"\n"
        changed.write_bytes(before + more)
        return real(*given)

    monkeypatch.setattr(module, name, change)
    with pytest.raises(ValueError, match="changed"):
        prepared.cached(data, data.path)
    monkeypatch.undo()
    changed.write_bytes(before)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    same(read_store(data, data.path, 0)[0], in_memory(data)[0])


def test_data_that_changed_and_are_restored_go_on_behind_what_they_were(tmp_path, monkeypatch):
    """What was read of the changed file must not stay as a whole shard of the one that it is again."""
    data = settings(tmp_path, [{"text": f"{'whale ' * 4000}{i}"} for i in range(200)])
    monkeypatch.setattr(making, "BLOCK_DOCUMENTS", 4)
    monkeypatch.setattr(making, "SHARD_DOCUMENTS", 4)
    source, real = Path(data.path), making.Growing.write
    before, times = source.read_bytes(), source.stat()

    def change(self, folder, number, dtype):
        shard = real(self, folder, number, dtype)
        if number == 0:
            with open(source, "r+b") as file:
                file.write(before.replace(b"whale", b"shark"))
        return shard

    monkeypatch.setattr(making.Growing, "write", change)
    with pytest.raises(ValueError, match="has changed while it was read"):
        prepared.cached(data, data.path)
    monkeypatch.setattr(making.Growing, "write", real)
    source.write_bytes(before)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    same(read_store(data, data.path, 0)[0], in_memory(data)[0])


def test_who_waits_for_a_lock_that_is_taken_away_waits_for_the_next_one(tmp_path):
    data = settings(tmp_path)
    folder, _, _ = cache._place(data, data.path, 0)
    path = folder.with_name(f"{folder.name}.lock")

    def hold():
        path.parent.mkdir()
        lock = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    first = hold()
    waiter = threading.Thread(target=prepared.cached, args=(data, data.path))
    waiter.start()
    time.sleep(0.3)
    shutil.rmtree(data.cache)
    second = hold()
    os.close(first)
    waiter.join(1.5)
    assert waiter.is_alive() and folders(data) == []
    os.close(second)
    waiter.join(LIMIT_S)
    assert prepared.find_cached(data, data.path) == folder


def test_a_finished_folder_is_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    data = settings(tmp_path)
    prepared.cached(data, data.path)
    monkeypatch.setattr("fcntl.flock", lambda *_: pytest.fail("locked"))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("written"))
    same(read_store(data, data.path, 0)[0], in_memory(data)[0])


def test_a_damaged_folder_is_told_and_can_be_removed(tmp_path):
    data = settings(tmp_path)
    folder = prepared.cached(data, data.path)
    os.truncate(folder / "00000.tokens", 10)
    with pytest.raises(ValueError, match=r"00000\.tokens has 10 bytes, .*; this is in the cache: remove "):
        read_store(data, data.path, 0)
    shutil.rmtree(folder)
    same(read_store(data, data.path, 0)[0], in_memory(data)[0])


def test_data_whose_changes_nobody_sees_are_read_into_memory(tmp_path, monkeypatch):
    class Streamed:
        features = ("text",)

        def __iter__(self):
            return iter([{"text": "a whale"}])

    streamed = sources.open(Streamed())
    for module in ("cache", "making"):
        monkeypatch.setattr(f"hsap.data.prepared.{module}.open_data", lambda *_: streamed)
    data = settings(tmp_path)
    assert prepared.cached(data, "hf:whales#train") is None
    assert len(read_store(data, "hf:whales#train", 0)[0].ids) == 1 and not Path(data.cache).exists()


COMMAND = """
import os, sys, time
from hsap.data import prepared
from hsap.data.config import data_config
from hsap.data.prepared import cache, making
if __name__ == "__main__":
    source, tokenizer, folder, slow = sys.argv[1:]
    cache.TOLD_AFTER_S, making.BLOCK_DOCUMENTS, making.SHARD_DOCUMENTS = 0.2, 8, 8
    write = making.Growing.write
    def slowly(self, out, number, dtype):
        with open(folder + "/who", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(float(slow))
        return write(self, out, number, dtype)
    making.Growing.write = slowly
    data = data_config({"path": source, "tokenizer": tokenizer, "chat_template": "chatml", "cache": folder + "/cache"})
    print(prepared.read_index(prepared.cached(data, source, who="rank")).content)
"""


def start(folder, slow):
    arguments = [sys.executable, folder / "command.py", folder / "rows.jsonl", TOKENIZER, folder, str(slow)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_one_process_prepares_and_where_it_is_killed_another_goes_on(tmp_path):
    data = settings(tmp_path)
    # Once: one that starts must not find it half written by the next one's start.
    (tmp_path / "command.py").write_text(COMMAND)
    running = {one.pid: one for one in (start(tmp_path, 0.3) for _ in range(3))}
    who, until = tmp_path / "who", time.monotonic() + LIMIT_S
    while not (who.exists() and len(who.read_text().split()) >= 4) and time.monotonic() < until:
        time.sleep(0.01)
    first = int(who.read_text().split()[0])
    running[first].send_signal(signal.SIGKILL)
    said = {pid: one.communicate(timeout=LIMIT_S) for pid, one in running.items()}
    assert sorted(one.returncode for one in running.values()) == [-signal.SIGKILL, 0, 0]
    writers = [int(pid) for pid in who.read_text().split()]
    assert len(set(writers)) == 2 and writers == sorted(writers, key=writers.index), "one after the other"
    # Whole shards stay: at most the one that was being written is made twice.
    shards = len(prepared.read_index(tmp_path / "cache" / folders(data)[0]).shards) if folders(data) else 0
    assert shards <= len(writers) <= shards + 1
    lived = [told for pid, told in said.items() if pid != first]
    assert len({out for out, _ in lived}) == 1
    # On a busy machine the last one may only have started when nothing was left to wait for.
    assert any("rank waits for the process that prepares data.path in " in err for _, err in lived)
    assert any("goes on behind " in err for _, err in lived)


def test_a_lock_that_the_file_system_lacks_is_told(tmp_path, monkeypatch):
    data = settings(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"data\.cache=.*No locks available"):
        prepared.cached(data, data.path)
