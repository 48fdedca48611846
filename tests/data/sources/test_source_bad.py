"""Corrupt and odd inputs: one table of what is wrong with a data set and what its reader says, or counts."""

import gzip
import io
import json
import re
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hsap.data import sources
from hsap.data.sources.source import EMPTY

FILES = Path(__file__).parents[1] / "files"
LINES = b"".join(json.dumps({"text": f"row {i} {i * 7919 % 1009}"}).encode() + b"\n" for i in range(2000))
ZSTD = zstandard.ZstdCompressor(write_checksum=True).compress(LINES)
MEGATRON = FILES / "megatron/ag_news_prompt_targets_document"


def idx(
    code=4, lengths=(2, 3), pointers=None, borders=(0, 1, 2), version=1, magic=b"MMIDIDX\0\0", counts=None
) -> bytes:
    pointers = np.cumsum([0, *lengths])[: len(lengths)] * 4 if pointers is None else pointers
    head = struct.pack("<9sQBQQ", magic, version, code, *(counts or (len(lengths), len(borders))))
    columns = ((lengths, "<i4"), (pointers, "<i8"), (borders, "<i8"))
    return head + b"".join(np.array(values, dtype).tobytes() for values, dtype in columns)


def megatron(index: bytes, ids=(1, 2, 3, 4, 5), dtype="<i4") -> dict[str, bytes]:
    return {"d.idx": index, "d.bin": np.array(ids, dtype).tobytes()}


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def llmc(magic: int, version: int, count: int, ids: list[int], letter: str = "H") -> bytes:
    return struct.pack("<256i", magic, version, count, *[0] * 253) + struct.pack(f"<{len(ids)}{letter}", *ids)


def parquet(**columns) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


def arrow(*batches: dict) -> bytes:
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, pa.table(batches[0]).schema) as writer:
        for batch in batches:
            writer.write_table(pa.table(batch))
    return stream.getvalue()


def folder(name: str, **changes) -> dict[str, bytes]:
    """The files of a sample folder, some of them changed or (None) missing."""
    files = {str(f.relative_to(FILES / name)): f.read_bytes() for f in (FILES / name).rglob("*") if f.is_file()}
    files |= {key.replace("__", "-").replace("_DOT_", "."): value for key, value in changes.items()}
    return {key: value for key, value in files.items() if value is not None}


def mds(change, name="mds/mixed-columns", **files) -> dict[str, bytes]:
    """A sample folder whose index.json went through `change`."""
    index = json.loads((FILES / name / "index.json").read_bytes())
    change(index)
    return {**folder(name), "index.json": json.dumps(index).encode(), **files}


def first(key, value, *more):
    def change(index):
        place = index["shards"][0]
        for part in (key, *more[:-1]):
            place = place[part] if more else place
        if more:
            place[more[-1]] = value
        else:
            place[key] = value

    return change


SHARD = (FILES / "mds/mixed-columns/shard.00000.mds").read_bytes()
STREAM = arrow({"text": ["one", "two"]}, {"text": ["three"]})
ROWS = parquet(text=["one", "two"] * 500)
CUT_STATE = json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}).encode()

TABLE = {
    # What is wrong: files (the one, or else their folder, is opened), settings, what is said.
    "JSON: gzip cut short": (
        {"d.jsonl.gz": gzip.compress(LINES)[:4000]},
        {},
        r"d.jsonl.gz:\d+: the gzip stream is cut",
    ),
    "JSON: Zstandard cut short": (
        {"d.jsonl.zst": ZSTD[:4000]},
        {},
        r"d.jsonl.zst:\d+: the Zstandard stream is cut short",
    ),
    "JSON: Zstandard cut in its last checksum": ({"d.jsonl.zst": ZSTD[:-1]}, {}, "Zstandard stream is cut short"),
    "JSON: Zstandard with a changed byte": (
        {"d.jsonl.zst": ZSTD[:3000] + bytes([ZSTD[3000] ^ 255]) + ZSTD[3001:]},
        {},
        "Zstandard stream is cut short or damaged",
    ),
    "JSON: Zstandard that asks for 2 GiB": (
        {"d.jsonl.zst": b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00"},
        {},
        "a file of 9 bytes asks for a window of 2147483648 bytes",
    ),
    "JSON: Zstandard followed by something else": (
        {"d.jsonl.zst": ZSTD + b"more"},
        {},
        "Zstandard stream is cut short",
    ),
    "JSON: array cut in an object": (
        {"d.json": b'[{"text": "a"},\n{"text": "b'},
        {},
        r"d.json:2: not valid JSON \(Unterm",
    ),
    "JSON: array cut between objects": ({"d.json": b'[{"text": "a"},\n'}, {}, "the file ends inside the array"),
    "JSON: array without a comma": (
        {"d.json": b'[{"text": "a"}\n{"text": "b"}]'},
        {},
        "d.json:2: not valid JSON .'{' between",
    ),
    "JSON: array and more": ({"d.json": b'[{"text": "a"}]\n{}'}, {}, "something follows the array"),
    "JSON: array of other things": (
        {"d.json": b'[{"text": "a"}, 12]'},
        {},
        r"d.json:1 \(item 1\): the item is a JSON int",
    ),
    "JSON: array that isn't UTF-8": (
        {"d.json": b'[{"text": "a"},\n{"text": "\xff"}]'},
        {},
        "d.json:2: not UTF-8 .byte 0xff",
    ),
    "JSON: array of arrays without end": ({"d.json": b"[" * 100_000}, {}, "d.json:1: not valid JSON"),
    "JSON: labels that are shifted": (
        {"d.jsonl": b'{"tokens": [1, 2, 3], "labels": [2, 3, -100]}'},
        {},
        "holds no document: .* 1 for labels that are neither their tokens nor -100 .undo a shift.*d.jsonl:1",
    ),
    "JSON: labels that are no list": (
        {"d.jsonl": b'{"tokens": [1], "labels": "1"}'},
        {},
        "d.jsonl:1: field 'labels' is not a list of integers",
    ),
    "JSON: too few labels": (
        {"d.jsonl": b'{"tokens": [1, 2], "labels": [1]}'},
        {},
        "1 for labels of another length than the tokens .*d.jsonl:1",
    ),
    "JSON: padding in the middle": (
        {"d.jsonl": b'{"tokens": [1, 2, 3], "attention_mask": [1, 0, 1]}'},
        {},
        "1 for attention_mask with zeros between ones, .*d.jsonl:1",
    ),
    "JSON: a negative id": (
        {"d.jsonl": b'{"tokens": [1, -2]}'},
        {},
        "d.jsonl:1: token 1 of the document has id -2, outside",
    ),
    "JSON: a mask of other numbers": (
        {"d.jsonl": b'{"tokens": [1], "loss_mask": [2]}'},
        {},
        "1 for loss_mask of other numbers than 0 and 1 .*d.jsonl:1",
    ),
    "parquet: cut short": ({"d.parquet": ROWS[:-9]}, {}, "d.parquet is no readable parquet file"),
    "parquet: empty": ({"d.parquet": b""}, {}, "d.parquet is no readable parquet file"),
    "parquet: wrong magic": (
        {"d.parquet": b"PARX" + ROWS[4:-4] + b"PARX"},
        {},
        "d.parquet is no readable parquet file",
    ),
    "parquet: a footer longer than the file": (
        {"d.parquet": ROWS[:-8] + struct.pack("<I", 1 << 31) + b"PAR1"},
        {},
        "d.parquet is no readable parquet file",
    ),
    "parquet: damaged data": (
        {"d.parquet": ROWS[:8] + b"\xff" * 60 + ROWS[68:]},
        {},
        "d.parquet is no readable parquet file",
    ),
    "parquet: null text": ({"d.parquet": parquet(text=["a", None])}, {}, "d.parquet:row 1: field 'text' is a NoneType"),
    "parquet: no field": (
        {"d.parquet": parquet(body=["a"])},
        {},
        "d.parquet:row 0: the row is no chat and has none of .*, only body",
    ),
    "parquet: null tokens": (
        {"d.parquet": parquet(tokens=[[1], [2, None]])},
        {},
        "row 1: field 'tokens' is not a list",
    ),
    "parquet: no rows": ({"d.parquet": parquet(text=pa.array([], pa.string()))}, {}, "holds no document: 1 file"),
    "parquet: text that isn't UTF-8": (
        {
            "d.parquet": parquet(
                text=pa.StringArray.from_buffers(1, pa.array([0, 1], "i4").buffers()[1], pa.py_buffer(b"\xff"))
            )
        },
        {},
        "d.parquet:row 0: a string isn't UTF-8",
    ),
    "Arrow: empty": ({"d.arrow": b""}, {}, "d.arrow is empty"),
    "Arrow: cut in a batch": ({"d.arrow": STREAM[:-60]}, {}, "d.arrow is no readable Arrow file"),
    "Arrow: cut between batches": ({"d.arrow": STREAM[:-8]}, {}, "ends without its end mark"),
    "Arrow: wrong magic": ({"d.arrow": b"nonsense" * 9}, {}, "d.arrow is no readable Arrow file"),
    "Arrow: a message of 2 GB": (
        {"d.arrow": b"\xff" * 4 + struct.pack("<i", (1 << 31) - 8) + STREAM[8:]},
        {},
        "d.arrow is no readable Arrow file",
    ),
    "Arrow: offsets that point anywhere": (
        {"d.arrow": STREAM.replace(struct.pack("<3i", 0, 3, 6), struct.pack("<3i", 0, 1 << 30, 6))},
        {},
        "d.arrow is no readable Arrow file",
    ),
    "Arrow: one name for two columns": (
        {"d.arrow": arrow({"text": ["a"], "texu": ["b"]}).replace(b"texu", b"text")},
        {},
        "d.arrow has several columns named 'text'",
    ),
    "Arrow: Feather 1": ({"d.feather": b"FEA1" + b"\0" * 40}, {}, "Feather file of version 1"),
    "saved data set: a missing shard": (
        folder("arrow/saved", data__00001__of__00002_DOT_arrow=None),
        {},
        "lists 2 files, but data-00001-of-00002.arrow is missing",
    ),
    "saved data set: a shard outside": (folder("arrow/saved", state_DOT_json=CUT_STATE), {}, "outside the data set"),
    "saved data set: no list": (folder("arrow/saved", state_DOT_json=b"{}"), {}, "lists no _data_files"),
    "saved data set: cut state": (folder("arrow/saved", state_DOT_json=b'{"_da'), {}, "can't be read as JSON"),
    "saved data set: several splits": (
        folder("arrow/splits"),
        {},
        "holds the splits train, test; name one, as in data.path=",
    ),
    "MDS: index cut short": (
        folder("mds/mixed-columns", index_DOT_json=b'{"version": 2, "sha'),
        {"format": "mds"},
        "no index of MDS",
    ),
    "MDS: another version": (mds(lambda index: index.update(version=3)), {}, "is of MDS version 3"),
    "MDS: another format": (mds(first("format", "csv")), {}, "shard 0 is of format 'csv'"),
    "MDS: missing shard": (
        {k: v for k, v in folder("mds/mixed-columns").items() if "shard" not in k},
        {},
        "shard 0 is missing",
    ),
    "MDS: shard outside": (mds(first("raw_data", "../x", "basename")), {}, "outside the data set"),
    "MDS: a billion samples": (mds(first("samples", 10**9)), {}, "doesn't begin with its 1000000000 samples"),
    "MDS: an impossible size": (mds(first("raw_data", -1, "bytes")), {}, "impossible columns or sizes"),
    "MDS: a packed shard without a name": (
        mds(first("zip_data", None, "basename"), "mds/tokens-zstd"),
        {},
        "impossible columns or sizes",
    ),
    "MDS: shard cut short": (
        mds(lambda i: None) | {"shard.00000.mds": SHARD[:-5]},
        {},
        "holds 888 bytes, its index says 893",
    ),
    "MDS: offsets outside": (
        mds(lambda i: None) | {"shard.00000.mds": SHARD[:8] + b"\xff" * 4 + SHARD[12:]},
        {},
        "offsets point outside the shard or backwards",
    ),
    "MDS: a column beyond its sample": (
        mds(lambda i: None)
        | {
            "shard.00000.mds": (at := struct.unpack("<I", SHARD[4:8])[0])
            and SHARD[:at] + b"\xff\xff\xff\x7f" + SHARD[at + 4 :]
        },
        {},
        "sample 0: column 'blob' reaches beyond the sample",
    ),
    "MDS: unpacks to more than its index says": (
        mds(first("raw_data", 100, "bytes"), "mds/tokens-zstd"),
        {},
        "holds at least 101 bytes, its index says 100",
    ),
    "MDS: an unknown compression": (
        mds(first("compression", "br:11"), "mds/tokens-zstd"),
        {},
        "is compressed by br:11",
    ),
    "MDS: pickles only": (
        mds(first("column_encodings", ["pkl"] * 6)),
        {},
        r"no column can be read as text or tokens, only blob \(pkl\)",
    ),
    "MDS: no samples at all": ({"index.json": b'{"shards": [], "version": 2}'}, {}, "holds no document: 1 file"),
    "Megatron: index cut short": (
        megatron(idx()[:-3]),
        {},
        "d.idx is cut short: 2 sequences and 3 document borders need 82",
    ),
    "Megatron: header cut short": (megatron(idx()[:20]), {}, "d.idx is cut short within its header"),
    "Megatron: index empty": (megatron(b""), {}, "d.idx is cut short within its header"),
    "Megatron: wrong magic": (
        megatron(idx(magic=b"MMAPIDX\0\0")),
        {"format": "megatron"},
        "d.idx is no Megatron index",
    ),
    "Megatron: fairseq's layout": (megatron(b"TNTIDX\0\0" + b"\0" * 90), {}, "d.idx is of fairseq's older layout"),
    "Megatron: version 2": (megatron(idx(version=2)), {}, "d.idx is of version 2"),
    "Megatron: dtype code 9": (megatron(idx(code=9)), {}, "names dtype code 9; there are 1 to 8"),
    "Megatron: another dtype than its data": (megatron(idx(code=8)), {}, "says 2 bytes a token, its pointers 4"),
    "Megatron: 2^60 sequences": (
        megatron(idx(counts=(1 << 60, 3))),
        {},
        "d.idx is cut short: 1152921504606846976 sequences",
    ),
    "Megatron: more behind the index": (megatron(idx() + b"\0\0"), {}, "2 bytes behind its document index"),
    "Megatron: pointers outside": (megatron(idx(pointers=(0, 1 << 62))), {}, "sequence 1 .* lies outside the 20 bytes"),
    "Megatron: negative pointer": (megatron(idx(pointers=(-4, 8))), {}, "sequence 0 .* lies outside"),
    "Megatron: negative length": (megatron(idx(lengths=(2, -1))), {}, "sequence 1 .* lies outside"),
    "Megatron: data cut short": (megatron(idx(), ids=(1, 2, 3, 4)), {}, "sequence 1 .* lies outside the 16 bytes"),
    "Megatron: no data": ({"d.idx": idx()}, {}, "has no d.bin beside it"),
    "Megatron: borders backwards": (megatron(idx(borders=(0, 2, 1, 2))), {}, "document 1 ends before it begins"),
    "Megatron: borders too far": (
        megatron(idx(borders=(0, 1, 7))),
        {},
        "goes from 0 to 7, not from 0 to its 2 sequences",
    ),
    "Megatron: negative ids": (
        megatron(idx(), ids=(1, 2, 3, -4, 5)),
        {},
        "d.bin:document 1: token 1 of the document has id -4",
    ),
    "Megatron: ids that aren't whole": (
        megatron(idx(code=7), ids=(1, 2.5, 3, 4, 5), dtype="<f4"),
        {},
        "d.bin:document 0: token 1 of the document has id 2.5",
    ),
    "nanoGPT: half a token": ({"d.bin": b"\1\0\2"}, {}, "d.bin has 3 bytes of tokens, no multiple of 2"),
    "nanoGPT: empty": ({"d.bin": b""}, {}, "holds no document: 1 file"),
    "llm.c: cut short": ({"d.bin": llmc(20240520, 1, 9, [1, 2])}, {}, "d.bin is cut short: 9 tokens of uint16 need 18"),
    "llm.c: more tokens than counted": ({"d.bin": llmc(20240520, 1, 1, [1, 2])}, {}, "2 bytes beyond the 1 tokens"),
    "llm.c: another version": ({"d.bin": llmc(20240801, 1, 1, [1], "I")}, {}, r"names version \[1\] \(not 7\)"),
    "llm.c: negative count": ({"d.bin": llmc(20240801, 7, -1, [1], "I")}, {}, "impossible number of tokens"),
    "llm.c: header alone": ({"d.bin": llmc(20240520, 1, 1, [])[:12]}, {}, "header is cut short"),
    "NumPy: no header and no dtype": (
        {"d.npy": b"\1\0\2\0"},
        {},
        "without a header; name the dtype .* in data.token_dtype",
    ),
    "NumPy: objects": ({"d.npy": npy(np.array([{"a": 1}, [2]], dtype=object))}, {}, r"array of object and shape \[2\]"),
    "NumPy: floats": ({"d.npy": npy(np.zeros(3))}, {}, "array of float64"),
    "NumPy: three axes": ({"d.npy": npy(np.zeros((2, 2, 2), int))}, {}, r"shape \[2, 2, 2\]"),
    "NumPy: cut short": ({"d.npy": npy(np.arange(9))[:-3]}, {}, "d.npy is cut short: 9 tokens of int64"),
    "NumPy: a shape of 2^60": (
        {"d.npy": npy(np.arange(1000)).replace(b"(1000,), }" + b" " * 15, b"(1152921504606846976,), }")},
        {},
        "d.npy is cut short: 1152921504606846976 tokens of int64",
    ),
    "NumPy: a header that runs code": (
        {"d.npy": b"\x93NUMPY\1\0" + struct.pack("<H", 40) + b"__import__('os').system('true')".ljust(39) + b"\n"},
        {},
        "d.npy has no header of a NumPy array",
    ),
    "NumPy: a header without an end": (
        {"d.npy": b"\x93NUMPY\1\0" + struct.pack("<H", 40) + b"{'descr': ((((".ljust(39) + b"\n"},
        {},
        "d.npy has no header of a NumPy array",
    ),
    "NumPy: a header of 4 GB": ({"d.npy": b"\x93NUMPY\2\0" + b"\xff" * 9}, {}, "d.npy has no header of a NumPy array"),
    "NumPy: an archive": ({"d.npz": b"PK\x03\x04" + b"\0" * 30}, {}, "d.npz is a zip archive"),
    "datatrove: index beyond the tokens": (
        {"d.ds": b"\1\0" * 4, "d.ds.index": struct.pack("<2Q", 2, 9)},
        {},
        "d.ds.index ends at token 9, which doesn't fit the 8 bytes",
    ),
    "datatrove: index backwards": (
        {"d.ds": b"\1\0" * 4, "d.ds.index": struct.pack("<3Q", 2, 1, 4)},
        {},
        "document 1 ends before",
    ),
    "datatrove: half an entry": ({"d.ds": b"\1\0" * 4, "d.ds.index": b"\4\0\0"}, {}, "d.ds.index has 3 bytes"),
    "datatrove: too short a mask": (
        {"d.ds": b"\1\0" * 4, "d.ds.index": struct.pack("<Q", 4), "d.ds.loss": b"\1"},
        {},
        "d.ds.loss has 1 bytes for 4 tokens",
    ),
    "text: not UTF-8": ({"a.txt": b"one\ntw\xff"}, {}, "a.txt:2: not UTF-8 .byte 0xff"),
    "text: empty files": (
        {"a.txt": b"", "b.txt": b"\xef\xbb\xbf"},
        {},
        r"holds no document: 2 file\(s\) read, 2 document",
    ),
    "unknown bytes": ({"d.dat": b"\0\1\2\3"}, {}, "d.dat is of no format .* set data.format to one of json, parquet"),
    "two formats in a folder": (
        {"a.jsonl": b"", "b.parquet": ROWS},
        {},
        r"several formats: a.jsonl \(json\), b.parquet",
    ),
    "data deeper in a folder": ({"README.md": b"", "data/a.parquet": ROWS}, {}, "has data deeper, like .*a.parquet"),
    "an unknown format": ({"a.jsonl": b""}, {"format": "tfrecord"}, "data.format='tfrecord': there is no such format"),
    "a format that isn't there": (
        {"a.jsonl": b"{}", "b": b""},
        {"format": "parquet"},
        "holds no data of parquet: it has no file that ends in .parquet",
    ),
    "both borders": ({"d.bin": b"\1\0"}, {"end_id": 1, "begin_id": 1}, "a border is one or the other"),
    "an unknown dtype": ({"d.npy": b"\1\0"}, {"token_dtype": "object"}, "there is no dtype of tokens 'object'"),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_wrong_is_said_in_one_paragraph_with_its_place(tmp_path, name):
    files, settings, told = TABLE[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    path = tmp_path / next(iter(files)) if len(files) == 1 else tmp_path
    with pytest.raises(ValueError) as error:
        for _ in sources.open(path, **settings):
            pass
    message = str(error.value)
    assert re.search(told, message), message
    assert "\n" not in message and len(message) < 1500


COUNTED = {
    "JSON": ({"d.jsonl": b'{"text": ""}\n{"tokens": []}\n{"text": "a"}\n'}, 2),
    "parquet": ({"d.parquet": parquet(tokens=[[], [1], []])}, 2),
    "Megatron": (megatron(idx(lengths=(0, 5), borders=(0, 1, 1, 2))), 2),
    "datatrove": ({"d.ds": b"\1\0" * 4, "d.ds.index": struct.pack("<4Q", 0, 2, 2, 4)}, 2),
}


def test_rows_whose_labels_or_masks_do_not_fit_are_left_out_alone(tmp_path):
    rows = [{"tokens": [1, 2], "labels": labels} for labels in ([1, 2], [2, -100], [1], [-100, -100])]
    rows += [{"tokens": [1, 2], "loss_mask": [1, 2]}, {"tokens": [1, 2, 3], "attention_mask": [1, 0, 1]}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = sources.open(tmp_path / "d.jsonl")
    assert [document.trained.tolist() for document in source] == [[True, True], [False, False]]
    assert len(source.tally.counts) == 4 and set(source.tally.counts.values()) == {1}
    assert [one.where.split(":")[-1] for one in source.tally.examples] == ["2", "3", "5", "6"]


@pytest.mark.parametrize("twice", [b'{"text": "a", "text": "b"}', b'{"text": "a", "meta": [{"n": 1, "n": 1}]}'])
@pytest.mark.parametrize("form", ["lines", "array"])
def test_a_row_that_names_a_field_twice_is_left_out(tmp_path, twice, form):
    good = b'{"text": "c", "meta": [{"n": 1}, {"n": 2}]}'
    long = b'{"text": "' + b"x" * 100_000 + b'"}'  # decoded anew when more of an array is there
    content = b"\n".join([twice, good, long, twice]) + b"\n"
    if form == "array":
        content = b"[" + content.strip().replace(b"}\n", b"},\n") + b"]"
    (tmp_path / "d.json").write_bytes(content)
    source = sources.open(tmp_path / "d.json")
    assert [document.text[0] for document in source] == ["c", "x"]
    assert source.tally.counts == {"a JSON object that names a field twice": 2}
    places = [one.where.removeprefix(f"{tmp_path / 'd.json'}:") for one in source.tally.examples]
    assert [place.split()[0] for place in places] == ["1", "4"]


def test_a_column_of_json_that_names_a_field_twice_is_left_out(tmp_path):
    columns = [b'"one"', b'{"a": 1, "a": 2}', b'"three"']
    samples = [struct.pack("<I", len(column)) + column for column in columns]
    offsets = 20 + np.cumsum([0, *map(len, samples)])
    shard = struct.pack("<5I", 3, *offsets) + b"".join(samples)
    entry = {"format": "mds", "compression": None, "zip_data": None, "samples": 3, "column_names": ["text"]}
    entry |= {"column_encodings": ["json"], "column_sizes": [None], "raw_data": {"basename": "s", "bytes": len(shard)}}
    (tmp_path / "s").write_bytes(shard)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    source = sources.open(tmp_path)
    assert [document.text for document in source] == ["one", "three"]
    assert [(one.where, one.reason) for one in source.tally.examples] == [
        (f"{tmp_path / 's'}:sample 1", "a JSON object that names a field twice")
    ]


@pytest.mark.parametrize("name", COUNTED)
def test_documents_of_no_tokens_are_counted(tmp_path, name):
    files, num_empty = COUNTED[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    source = sources.open(tmp_path)
    documents = list(source)
    assert (source.tally.num_empty, source.tally.num_documents) == (num_empty, len(documents))
    assert f"{num_empty} for {EMPTY} (" in source.tally.told()


def test_a_bomb_is_unpacked_no_further_than_a_row_may_be_long(tmp_path, monkeypatch):
    from hsap.data.sources import jsonl

    monkeypatch.setattr(jsonl, "MAX_DOCUMENT_BYTES", 1 << 20)
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(pack(b'{"text": "' + b"x" * (1 << 26)))
        with pytest.raises(ValueError, match=rf"{name}:1: the line is longer than 1048576 bytes"):
            list(sources.open(tmp_path / name))
    (tmp_path / "b.json").write_bytes(b'[{"text": "' + b"x" * (1 << 23))
    with pytest.raises(ValueError, match=r"b.json:1: not valid JSON \(the item that begins here goes on for 1048576"):
        list(sources.open(tmp_path / "b.json"))


def test_a_file_of_too_many_tokens_without_borders_asks_for_them(tmp_path, monkeypatch):
    from hsap.data.sources import tokens

    monkeypatch.setattr(tokens, "MAX_DOCUMENT_TOKENS", 1000)
    with pytest.raises(ValueError, match=r"val.bin:document 0 has 10000 tokens, more than 1000; .* data.end_id"):
        list(sources.open(FILES / "nanogpt/val.bin"))
