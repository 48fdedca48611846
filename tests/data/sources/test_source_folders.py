"""Folders as people have them: links and loops, what is no file, names of any kind, and members of all of these."""

import gzip
import json
import os
import random

import numpy as np
import pytest
import zstandard

from hsap.data import sources

ROW = b'{"text": "one"}\n'


def read(path, **options):
    return [(one.id, one.text) for one in sources.open(path, **options)]


def write(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_linked_folders_of_text_are_read_and_loops_end(tmp_path):
    top = tmp_path / "top"
    write(top / "a" / "x.txt", b"x")
    write(tmp_path / "elsewhere" / "y.txt", b"y")
    (top / "linked").symlink_to("../elsewhere")
    (top / "a" / "loop").symlink_to("..")
    (top / "a" / "other").symlink_to("../c")
    (top / "a" / "up").symlink_to(tmp_path)
    (top / "c").mkdir()
    (top / "c" / "back").symlink_to("../a")
    ids = [one for one, _ in read(top)]
    assert {"a/x.txt", "linked/y.txt", "c/back/x.txt"} <= set(ids) and len(ids) == len(set(ids)) < 20
    assert read(top, format="text") == read(top)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".parquet"])
def test_what_is_named_like_data_and_cannot_be_read_is_not_left_out(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", ROW)
    odd = tmp_path / f"b{suffix}"
    for make, told in (
        (os.mkfifo, "b.* is named like data and is no regular file; take it away"),
        (lambda path: path.symlink_to("missing"), "can't be read .*No such file or directory: .*b"),
        (lambda path: path.symlink_to(path.name), "can't be read .*symbolic links: .*b"),
    ):
        make(odd)
        with pytest.raises(ValueError, match=told):
            read(tmp_path)
        odd.unlink()
    odd.mkdir()
    if suffix != ".parquet":
        assert len(read(tmp_path)) == 1


def test_a_pipe_a_missing_name_and_a_folder_that_cannot_be_listed_are_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(ValueError, match=r"d.jsonl is no regular file; set data.path"):
        read(tmp_path / "d.jsonl")
    with pytest.raises(ValueError, match=r"data.path \(or data.eval_path\) is empty"):
        read("")
    write(tmp_path / "texts" / "a.txt", b"x")
    (tmp_path / "texts" / "closed").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"can't be read .*Permission denied: .*closed"):
        read(tmp_path / "texts")


def test_suffixes_are_told_in_any_case(tmp_path):
    write(tmp_path / "rows" / "a.jsonl", ROW)
    write(tmp_path / "rows" / "B.JSONL", ROW)
    write(tmp_path / "texts" / "a.txt", b"x")
    write(tmp_path / "texts" / "B.TXT", b"y")
    assert [one for one, _ in read(tmp_path / "rows")] == ["B.JSONL:1", "a.jsonl:1"]
    assert [one for one, _ in read(tmp_path / "texts")] == ["B.TXT", "a.txt"]
    assert read(tmp_path / "texts" / "B.TXT") == [("B.TXT", "y")]


def test_a_name_that_is_no_text_stays_out_of_documents_and_of_what_is_printed(tmp_path):
    tree = tmp_path / "tree"
    write(tree / ".git" / "HEAD", b"ref")
    write(tree / "a.py", b"x")
    odd = os.fsencode(tree) + b"/\xff.py"
    with open(odd, "wb") as stream:
        stream.write(b"y")
    source = sources.open(tree)
    assert [one.text for one in source] == ["==> a.py <==\nx\n"]
    assert source.tally.counts == {"a file in a source tree whose name isn't UTF-8": 1}
    assert source.tally.told().encode("utf-8").endswith(b"\\udcff.py)")


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.json.zst", "d.txt.gz"])
def test_an_empty_file_is_no_compressed_one(tmp_path, name):
    path = write(tmp_path / name, b"")
    with pytest.raises(ValueError, match=r"(gzip|Zstandard) stream is cut short or damaged \(it is empty\)"):
        read(path)


def members(random, rows: list[bytes], pack) -> bytes:
    """Compress rows in several members, at borders of lines and within them."""
    content, data, at = b"".join(rows), b"", 0
    while at < len(content):
        size = random.randint(1, len(content) // 2)
        data += pack(content[at : at + size])
        at += size
    return data


@pytest.mark.parametrize("form", ["lines", "gz", "zst", "array", "npy", "text", "trees"])
def test_readers_of_any_number_share_files_of_any_size(tmp_path, form):
    for seed in range(3):
        rng, folder = random.Random(f"{form} {seed}"), tmp_path / str(seed)
        for number in range(3):
            count = [0, 1, 7, 67][rng.randrange(4)] + (number == 0)
            rows = [json.dumps({"text": "é\u2028\0"[: rng.randrange(4)]}).encode() for _ in range(count)]
            lines = [row + rng.choice([b"\n", b"\r\n", b"\n \t\n"]) for row in rows]
            if form == "lines":
                write(folder / f"{number}.jsonl", b"\xef\xbb\xbf" + b"".join(lines).rstrip())
            elif form == "gz":
                write(folder / f"{number}.jsonl.gz", gzip.compress(b"") + members(rng, lines, gzip.compress))
            elif form == "zst":
                pack = zstandard.ZstdCompressor(write_content_size=False).compress
                skipped = b"\x53\x2a\x4d\x18\x03\0\0\0abc"
                write(folder / f"{number}.jsonl.zst", skipped + members(rng, lines, pack))
            elif form == "array":
                write(folder / f"{number}.json", b"[" + b"\n, ".join(rows) + b"]")
            elif form == "npy":
                folder.mkdir(exist_ok=True)
                np.save(folder / f"{number}.npy", np.arange(2 * count, dtype=">u2").reshape(count, 2))
            elif form == "text":
                for i in range(count):
                    write(
                        folder / f"é{number}" / f"{i}.txt",
                        b"\xef\xbb\xbf" * rng.randrange(2) + b"a\r\n\0" * rng.randrange(2),
                    )
            else:
                write(folder / f"{number}" / ".git" / "HEAD", b"ref")
                write(folder / f"{number}" / "a.py", b"x" * count)
        dealt = [sources.open(folder, shard=(i, 4)) for i in range(4)]
        parts = [[one.where for one in source] for source in dealt]
        whole = sources.open(folder)
        try:
            places = [one.where for one in whole]
        except ValueError as error:
            assert "holds no document" in str(error)
            places = []
        assert sorted(place for part in parts for place in part) == sorted(places)
        assert sum(source.tally.num_empty for source in dealt) == whole.tally.num_empty


def test_data_in_folders_beside_the_files_are_told(tmp_path):
    names = ("a.jsonl", "more/deep/b.jsonl", "more/c.jsonl", "shards/index.json", "old/d.parquet")
    names += ("_delta_log/0.jsonl", ".hidden/e.jsonl", ".git/f.jsonl", "docs/read.md", "tokenizer/tokenizer.json")
    for name in names:
        write(tmp_path / name, ROW)
    for shard, told in (((0, 1), ["more/c.jsonl", "old/d.parquet", "shards/index.json"]), ((1, 2), [])):
        source = sources.open(tmp_path, shard=shard)
        list(source)
        assert [os.path.relpath(one.where, tmp_path) for one in source.tally.examples] == told
        assert source.tally.counts == ({"data in a folder beside the files that are read": 3} if told else {})
    # Bare .json files are data where there is nothing else, and deeper then as well.
    (tmp_path / "a.jsonl").rename(tmp_path / "a.json")
    source = sources.open(tmp_path, format="json")
    assert len(list(source)) == 1 and len(source.tally.examples) == 3
    assert str(tmp_path / "tokenizer/tokenizer.json") in [str(file) for file in source.beside]


def test_folders_beside_the_files_that_nobody_may_list_are_no_fault(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", ROW)
    (tmp_path / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    source = sources.open(tmp_path)
    assert len(list(source)) == 1 and not source.tally.counts
