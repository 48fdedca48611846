"""Every format, read from real files: the values are those that the format's own library reads."""

import json
import struct
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from hsap.data import sources
from hsap.data.fields import Fields

FILES = Path(__file__).parents[1] / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))
TOKENS = EXPECTED["mds/tokens-zstd"]


def read(path, fields=None, **options):
    return list(sources.open(path, fields, **options))


def texts(path, fields=None, **options):
    return [document.text for document in read(path, fields, **options)]


def tokens(path, fields=None, **options):
    return [document.tokens.tolist() for document in read(path, fields, **options)]


@pytest.mark.parametrize("name", ["parquet/sample.parquet", "parquet/demo-dataset.parquet", "arrow/saved"])
def test_tables_are_read_as_datasets_reads_them(name):
    assert texts(FILES / name) == EXPECTED[name]


def test_mds_is_read_as_streaming_reads_it():
    assert texts(FILES / "mds/mixed-columns") == EXPECTED["mds/mixed-columns"]
    assert texts(FILES / "mds/mixed-columns/index.json") == EXPECTED["mds/mixed-columns"]
    naive = read(FILES / "mds/streaming-naive", Fields(text="dept"))
    assert [document.text for document in naive] == EXPECTED["mds/streaming-naive"]
    assert naive[0].id.isdecimal(), "the column `id` names the documents"
    packed = read(FILES / "mds/tokens-zstd")
    assert [document.tokens.tolist() for document in packed] == TOKENS
    assert [document.id for document in packed] == ["d0", "d1", "d2", "d3"]
    assert len(list((FILES / "mds/tokens-zstd").glob("*.zstd"))) > 1


def test_the_libraries_themselves_where_they_are_installed(tmp_path):
    streaming = pytest.importorskip("streaming")
    data = streaming.StreamingDataset(local=str(FILES / "mds/mixed-columns"), batch_size=1, allow_unsafe_types=True)
    assert texts(FILES / "mds/mixed-columns") == [data[i]["text"] for i in range(len(data))]


def test_datatrove_where_it_is_installed():
    dataset = pytest.importorskip("datatrove.utils.dataset")
    window = dataset.DatatroveFileDataset(str(FILES / "datatrove/small.ds"), seq_len=24, token_size=2)[0]["input_ids"]
    assert np.concatenate(tokens(FILES / "datatrove/small.ds")).tolist() == window.tolist()


def test_labels_and_padding_say_which_tokens_are_trained():
    first, second, third, fourth = read(FILES / "arrow/splits/test")
    assert first.tokens.tolist() == TOKENS[0] == EXPECTED["arrow/splits/test"][0]
    assert first.trained.tolist() == [False, True, True]
    assert second.trained.tolist() == [False, False]
    assert third.tokens.tolist() == [9] * 30, "ten tokens are padding"
    assert fourth.trained.tolist() == [True]


def test_hugging_face_objects_are_read_without_their_library(tmp_path):
    class Table:
        features = ("text", "extra")
        column_names = ("text", "extra")
        rows = tuple({"text": text, "extra": 0} for text in "abcde")

        def select_columns(self, names):
            assert names == ["text"]
            return self

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            return self.rows[index]

        def __iter__(self):
            return iter(self.rows)

    class Stream:
        features = None
        column_names = None

        def __iter__(self):
            return iter(Table.rows)

    for given in (Table(), Stream(), {"train": Table()}):
        assert texts(given) == list("abcde")
        assert [texts(given, shard=(i, 2)) for i in range(2)] == [["a", "c", "e"], ["b", "d"]]
    with pytest.raises(ValueError, match="the splits train, test; give one"):
        read({"train": Table(), "test": Table()})


def test_hugging_face_s_own_objects(tmp_path):
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "load_from_disk"):
        pytest.skip("only this project's folder of that name is there")
    saved = datasets.load_from_disk(str(FILES / "arrow/saved"))
    assert texts(saved) == texts(saved.to_iterable_dataset()) == EXPECTED["arrow/saved"]


def test_a_name_of_the_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:some/data#train is read by .*pip install \"hsap\[hf\]\""):
        sources.open("hf:some/data#train")
    with pytest.raises(ValueError, match="write hf:NAME#SPLIT"):
        sources.open("hf:some/data")


def independent_megatron(stem: Path) -> list[list[int]]:
    """The .idx taken apart with struct alone, token by token."""
    index, data = stem.with_suffix(".idx").read_bytes(), stem.with_suffix(".bin").read_bytes()
    magic, version, code, count, borders = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    letter = " BbhiqdfH"[code]
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    pointers = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    documents = struct.unpack_from(f"<{borders}q", index, 34 + 12 * count)
    sequences = [list(struct.unpack_from(f"<{n}{letter}", data, p)) for n, p in zip(lengths, pointers)]
    return [list(chain(*sequences[a:b])) for a, b in pairwise(documents)]


@pytest.mark.parametrize("side", ["inputs", "targets"])
def test_megatron(side):
    stem = FILES / f"megatron/ag_news_prompt_{side}_document"
    documents = independent_megatron(stem)
    assert len(documents) == 100
    for path in (stem, stem.with_suffix(".idx"), stem.with_suffix(".bin")):
        assert tokens(path) == documents
    assert len(tokens(FILES / "megatron")) == 200


def write_megatron(stem: Path, code: int, lengths, borders, values, pointers=None, version=1, magic=b"MMIDIDX\0\0"):
    dtype = np.dtype(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")[code - 1])
    data = np.array(values).astype(dtype).tobytes()
    starts = np.cumsum([0, *lengths])[:-1] * dtype.itemsize if pointers is None else pointers
    head = struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(borders))
    columns = [np.array(lengths, "<i4"), np.array(starts, "<i8"), np.array(borders, "<i8")]
    stem.with_suffix(".idx").write_bytes(head + b"".join(column.tobytes() for column in columns))
    stem.with_suffix(".bin").write_bytes(data)
    return stem


@pytest.mark.parametrize("code", range(1, 9))
def test_megatron_s_dtypes_and_documents_of_several_sequences(tmp_path, code):
    stem = write_megatron(tmp_path / "d", code, [2, 0, 3, 1], [0, 2, 2, 3, 4], [1, 2, 3, 100, 5, 6])
    source = sources.open(stem)
    assert (
        [d.tokens.tolist() for d in source]
        == [[1, 2], [3, 100, 5], [6]]
        == independent_megatron(stem)[:1] + (independent_megatron(stem)[2:])
    )
    assert source.tally.num_empty == 1
    assert all(d.tokens.dtype == np.int64 for d in source)


def test_nanogpt_is_one_document_or_split_at_an_id_that_the_user_names():
    path = FILES / "nanogpt/val.bin"
    raw = list(struct.unpack("<10000H", path.read_bytes()))
    assert tokens(path) == [raw]
    newline = max(set(raw), key=raw.count)
    parts = tokens(path, end_id=newline)
    assert list(chain(*parts)) == raw and all(part.index(newline) == len(part) - 1 for part in parts[:-1])
    parts = tokens(path, begin_id=newline)
    assert list(chain(*parts)) == raw and all(part.count(newline) == 1 == part.index(newline) + 1 for part in parts[1:])
    assert [tokens(path, end_id=newline, shard=(i, 3)) for i in range(3)] == [
        tokens(path, end_id=newline)[i::3] for i in range(3)
    ]


@pytest.mark.parametrize(("magic", "version", "letter", "top"), [(20240520, 1, "H", 50256), (20240801, 7, "I", 128000)])
def test_llm_c(tmp_path, magic, version, letter, top):
    ids = [top, 1, 2, top, 3]
    path = tmp_path / "d.bin"
    path.write_bytes(struct.pack("<256i", magic, version, len(ids), *[0] * 253) + struct.pack(f"<5{letter}", *ids))
    assert tokens(path) == [ids]
    assert tokens(path, begin_id=top) == [[top, 1, 2], [top, 3]]
    renamed = path.rename(tmp_path / "shard_000001")
    assert sources.open(renamed).format == "bin"


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "u1", "<i8", "<u4"])
def test_numpy_arrays(tmp_path, dtype):
    flat = np.arange(12, dtype=dtype)
    np.save(tmp_path / "flat.npy", flat)
    np.save(tmp_path / "rows.npy", flat.reshape(3, 4))
    assert tokens(tmp_path / "flat.npy") == [list(range(12))]
    assert tokens(tmp_path / "flat.npy", end_id=4) == [list(range(5)), list(range(5, 12))]
    assert tokens(tmp_path / "rows.npy") == flat.reshape(3, 4).tolist()
    (tmp_path / "bare.npy").write_bytes(flat.astype("<u4").tobytes())
    assert tokens(tmp_path / "bare.npy", token_dtype="uint32") == [list(range(12))]


def test_datatrove():
    small, large = read(FILES / "datatrove/small.ds"), read(FILES / "datatrove/large.ds")
    assert [d.tokens.tolist() for d in small] == [[1, 2, 3, 65000], [7], [5] * 20]
    assert [d.trained.tolist() for d in small] == [[True, False, True, True], [False], [True] * 20]
    assert [d.tokens.tolist() for d in large] == [[70001, 70002, 70003, 135000], [70007], [70005] * 20]
    assert large[0].trained is None
    assert len(read(FILES / "datatrove")) == 6


def test_zstandard_in_several_frames_of_unknown_size(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": f"{i} " * (i * 37 % 900)}) + "\n" for i in range(1, 400)]
    packer = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    frames = [packer.compress("".join(lines[i : i + 100]).encode()) for i in range(0, 400, 100)]
    skipped = struct.pack("<II", 0x184D2A50, 5) + b"hello"
    path = tmp_path / "d.jsonl.zst"
    path.write_bytes(skipped + frames[0] + frames[1] + skipped + frames[2] + frames[3])
    assert texts(path) == [json.loads(line)["text"] for line in lines]
    path.rename(tmp_path / "renamed")
    assert len(texts(tmp_path / "renamed")) == 399


def test_an_array_of_objects_is_streamed_across_its_blocks(tmp_path):
    rows = [{"id": i, "text": f'é🐋"\\{i}' * (1 if i % 50 else 20_000), "n": [i, {"a": None}]} for i in range(1, 300)]
    for name, layout in (("wide.json", {"indent": 2}), ("dense.json", {}), ("ascii.json", {"ensure_ascii": True})):
        path = tmp_path / name
        path.write_text(json.dumps(rows, **{"ensure_ascii": False, **layout}), encoding="utf-8")
        assert texts(path) == [row["text"] for row in rows]
    places = [document.where for document in read(tmp_path / "wide.json")]
    assert places[0] == f"{tmp_path / 'wide.json'}:2 (item 0)"
    assert places[1] == f"{tmp_path / 'wide.json'}:12 (item 1)"


def test_text_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "deep/c.md").write_text("third")
    (tmp_path / "a.txt").write_text("\ufefffirst", encoding="utf-8")
    (tmp_path / "deep/.hidden.txt").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    source = sources.open(tmp_path)
    assert [(d.id, d.text) for d in source] == [("a.txt", "first"), ("b.txt", "second\n"), ("deep/c.md", "third")]
    assert (source.format, source.tally.num_empty) == ("text", 1)


@pytest.fixture
def repositories(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / ".git").mkdir()
        (tmp_path / name / ".git/HEAD").write_text("ref")
        (tmp_path / name / "src/b.py").write_text(f"print('{name}')")
        (tmp_path / name / "Makefile").write_text("all:\n")
    (tmp_path / "two/logo.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "two/old.c").write_bytes("/* é */".encode("latin-1"))
    (tmp_path / "two/huge.sql").write_bytes(b"x" * (1 << 20) + b"y")
    (tmp_path / "two/link.py").symlink_to("src/b.py")
    return tmp_path


def test_source_trees_are_a_document_a_repository(repositories):
    source = sources.open(repositories)
    assert source.format == "source_trees"
    assert [(d.id, d.text) for d in source] == [
        (name, f"==> Makefile <==\nall:\n\n==> src/b.py <==\nprint('{name}')\n") for name in ("one", "two")
    ]
    assert sorted(source.tally.counts.values()) == [1, 1, 1, 1] and source.tally.num_rejected == 4
    assert str(repositories / "two/logo.png") in source.tally.told()
    assert sources.open(repositories / "one").format == "source_tree"
    assert len(texts(repositories / "one/src", format="source_tree")) == 1


ALL = {
    "parquet/demo-dataset.parquet": {},
    "arrow/saved": {},
    "mds/mixed-columns": {},
    "mds/tokens-zstd": {},
    "megatron": {},
    "datatrove": {},
    "nanogpt/val.bin": {"end_id": 0},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("readers", [2, 7])
def test_readers_share_a_data_set_document_by_document(name, readers):
    whole = [(d.id, d.where) for d in read(FILES / name, **ALL[name])]
    parts = [[(d.id, d.where) for d in read(FILES / name, shard=(i, readers), **ALL[name])] for i in range(readers)]
    assert parts == [whole[i::readers] for i in range(readers)]
    assert len({one for one, _ in whole}) == len(whole), "every document has an id of its own"


def test_a_walk_holds_no_more_than_it_needs(tmp_path):
    code = """
import resource, sys
from hsap.data import sources
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in sources.open(sys.argv[1]))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    path = tmp_path / "d.json"
    with open(path, "w") as file:
        file.write("[")
        file.writelines(("," if i else "") + json.dumps({"text": "x" * 50_000}) for i in range(800))
        file.write("]")
    for command in ([], ["gzip", "-1", "-k"]):
        if command:
            subprocess.run([*command, path], check=True)
        read_path = path.with_name("d.json.gz") if command else path
        done = subprocess.run([sys.executable, "-c", code, read_path], capture_output=True, text=True, check=True)
        count, kib = map(int, done.stdout.split())
        assert count == 800 and kib < 20_000, "of 40 MB of text"
