"""The index of prepared data: what is in a folder, and checks of what a stranger may have written there."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsap.data.prepared.recipe import recipe_of_json
from hsap.data.sources import Rejection, Tally
from hsap.data.sources.detect import PREPARED
from hsap.files import short
from hsap.ir.check import Refused, fields, instance, one_of, shown, whole

INDEX = PREPARED
FORMAT, VERSION = "hsap prepared documents", 2
NEEDED = ("tokens", "starts", "ids", "id_starts")
ANSWERS = ("answer_starts", "answers")
COLUMNS = (*NEEDED, "trained", *ANSWERS)
_NAMES = ("ids", "id_starts")
TOKEN_DTYPES = {"uint16": 1 << 16, "uint32": 1 << 31}
"""Types of stored tokens, with the vocabulary that each holds; ids are int32 in memory."""
MAX_COUNT = 1 << 48
_MAX_SHARDS = 100_000
_MAX_INDEX_BYTES = 1 << 30
_FIELDS = (
    *("format", "version", "documents", "tokens", "token_dtype", "recipe", "settings", "source", "left_out"),
    *("shards", "sha256"),
)


@dataclass(frozen=True, slots=True)
class File:
    """A column's file. sha256: hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of the documents. read: how many the source gave for it; chats: how many of them were chats.

    trained: tokens that are. columns: files by the names of `COLUMNS`.
    """

    documents: int
    tokens: int
    trained: int
    read: int
    chats: int
    columns: Mapping[str, File]

    @classmethod
    def of_json(cls, value: Any, where: str, token_dtype: str) -> Shard:
        """Read a shard's entry; ValueError for one that no writer can have written."""
        fields(where, value, ("documents", "tokens", "trained", "read", "chats", "columns"))
        counts = [whole(f"{where}.{name}", value[name], 0, MAX_COUNT) for name in ("documents", "tokens", "read")]
        documents, tokens, read = counts
        trained = whole(f"{where}.trained", value["trained"], 0, tokens)
        chats = whole(f"{where}.chats", value["chats"], 0, read)
        columns = _mapping(f"{where}.columns", value["columns"])
        for name, file in columns.items():
            one_of(f"{where}.columns: there is no column", name, COLUMNS, "columns")
            fields(f"{where}.columns.{name}", file, ("bytes", "sha256"))
            whole(f"{where}.columns.{name}.bytes", file["bytes"], 0, MAX_COUNT)
            _digest(f"{where}.columns.{name}.sha256", file["sha256"])
        missing = [name for name in NEEDED if name not in columns]
        if missing or len([name for name in ANSWERS if name in columns]) == 1:
            raise Refused(f"{where}.columns lacks {', '.join(missing) or 'answers or their starts'}")
        shard = cls(documents, tokens, trained, read, chats, {name: File(**file) for name, file in columns.items()})
        for name, num_bytes in shard.expected_bytes(token_dtype).items():
            if name in columns and shard.columns[name].bytes != num_bytes:
                raise Refused(
                    f"{where}.columns.{name} has {shard.columns[name].bytes} bytes; {shard.documents} documents of "
                    f"{shard.tokens} tokens ({token_dtype}) have {num_bytes}"
                )
        if "answers" in columns and columns["answers"]["bytes"] % 8:
            raise Refused(f"{where}.columns.answers has {columns['answers']['bytes']} bytes, no multiple of 8")
        return shard

    def expected_bytes(self, token_dtype: str) -> dict[str, int]:
        """Say how long the columns are whose length follows from the counts."""
        width, borders = (2 if token_dtype == "uint16" else 4), 8 * (self.documents + 1)
        starts = dict.fromkeys(("starts", "id_starts", "answer_starts"), borders)
        return {"tokens": width * self.tokens, "trained": -(-self.tokens // 8), **starts}


@dataclass(frozen=True, slots=True)
class Index:
    """What a folder holds; the fields are those of the JSON file (see `hsap.data.prepared`)."""

    documents: int
    tokens: int
    token_dtype: str
    recipe: Mapping[str, Any]
    settings: Mapping[str, object]
    source: Mapping[str, object]
    left_out: Tally
    shards: tuple[Shard, ...]

    @property
    def vocab_size(self) -> int:
        return self.recipe["tokenizer"]["vocab_size"]

    @property
    def chats(self) -> np.ndarray | None:
        """Which documents are chats: int8 [documents]; None: none is.

        0: no; 1: yes; 2: perhaps, as the shard it is in has both, and of each document it isn't kept.
        """
        if not any(shard.chats for shard in self.shards):
            return None
        kinds = [min(shard.chats, 1 if shard.chats == shard.read else 2) for shard in self.shards]
        return np.repeat(np.array(kinds, np.int8), [shard.documents for shard in self.shards])

    @property
    def content(self) -> str:
        """Describe the data by what is trained, for checkpoints: no path, no time, no name of a document.

        Raw data and what was prepared of them have the same.
        """
        columns = [
            [name, file.sha256]
            for shard in self.shards
            for name, file in sorted(shard.columns.items())
            if name not in _NAMES
        ]
        digest = hashlib.sha256(_canonical([self.token_dtype, columns]))
        return f"{self.documents} documents, {self.tokens} tokens, {short(digest.hexdigest())}"

    def to_json(self) -> dict[str, Any]:
        """Give the JSON object, its checksum included."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("left_out", "shards")}
        shards = [asdict(shard) for shard in self.shards]
        values = {"format": FORMAT, "version": VERSION, **plain, "left_out": tally_json(self.left_out)}
        return signed({**values, "shards": shards})


def is_prepared(path: object) -> bool:
    """Say whether a path is a folder of prepared data, finished or not."""
    return isinstance(path, str | Path) and any((Path(path) / name).is_file() for name in (INDEX, "unfinished.json"))


def read_index(folder: str | Path) -> Index:
    """Read the index of a folder and check every field of it, but not yet the other files.

    ValueError: no finished index there, a damaged one, one of another version, fields that can't be; names the file.
    """
    path = Path(folder) / INDEX
    if not path.is_file():
        raise Refused(
            f"{folder} holds no finished prepared data (there is no {INDEX}); run the `hsap prepare` that began it "
            f"again, it goes on where it was"
        )
    values = read_signed(path)
    try:
        return _index(values)
    except ValueError as error:
        raise Refused(
            f"{path} is no index of prepared data: {error}; copy it again, or prepare the data anew"
        ) from error


def signed(values: dict[str, Any]) -> dict[str, Any]:
    """Add the checksum of JSON values to them."""
    return {**values, "sha256": hashlib.sha256(_canonical(values)).hexdigest()}


def read_signed(path: Path) -> dict[str, Any]:
    """Read a JSON object that has its own checksum; ValueError, which names the file, for any other content."""
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise Refused(f"it has {path.stat().st_size} bytes, of {_MAX_INDEX_BYTES} at most")
        values = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        if not isinstance(values, dict) or "sha256" not in values:
            raise Refused("it is no JSON object with a checksum")
        if signed({name: value for name, value in values.items() if name != "sha256"}) != values:
            raise Refused("it doesn't have the SHA-256 that it says")
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path} can't be used: {error}; copy it again, or prepare the data anew") from error
    return values


def check_file(path: Path, num_bytes: int) -> None:
    """Refuse what isn't a plain file of so many bytes."""
    try:
        found = path.lstat()
    except OSError as error:
        raise Refused(f"{path} can't be read ({error.strerror}); copy the folder again, all of its files") from error
    if not stat.S_ISREG(found.st_mode):
        raise Refused(f"{path} is no plain file; copy the file itself, links aren't followed")
    if found.st_size != num_bytes:
        raise Refused(
            f"{path} has {found.st_size} bytes, and had {num_bytes} when it was written: it is cut short or another's; "
            f"copy it again, or prepare the data anew"
        )


def column_file(folder: Path, shard: int, column: str) -> Path:
    """Where a column of a shard lies."""
    return folder / f"{shard:05d}.{column}"


def tally_json(tally: Tally) -> dict[str, Any]:
    """Give what was left out as JSON values."""
    examples = [[one.where, one.reason] for one in tally.examples]
    return {"counts": dict(tally.counts), "notes": dict(tally.notes), "examples": examples}


def tally_of_json(value: Any, where: str) -> Tally:
    """Read what was left out; ValueError for what isn't so."""
    fields(where, value, ("counts", "notes", "examples"))
    tally = Tally()
    for name, counts in (("counts", tally.counts), ("notes", tally.notes)):
        for reason, count in _mapping(f"{where}.{name}", value[name]).items():
            counts[reason] = whole(f"{where}.{name}", count, 1, MAX_COUNT)
    for example in instance(f"{where}.examples", value["examples"], list, "a list"):
        sound = isinstance(example, list) and len(example) == 2 and all(isinstance(text, str) for text in example)
        if not sound or not (example[1] in tally.counts or example[1] in tally.notes):
            raise Refused(f"{where}.examples has {shown(example)}; an example is a place and a reason that is counted")
        tally.examples.append(Rejection(*example))
    return tally


def _index(values: dict[str, Any]) -> Index:
    fields("the object", values, _FIELDS)
    if values["format"] != FORMAT or values["version"] != VERSION:
        raise Refused(
            f"it is {shown(values['format'])} of version {shown(values['version'])}, not {FORMAT!r} {VERSION}"
        )
    dtype = one_of("token_dtype: there is no", values["token_dtype"], TOKEN_DTYPES, "types")
    recipe = recipe_of_json(values["recipe"], TOKEN_DTYPES[dtype])
    entries = instance("shards", values["shards"], list, "a list")
    if len(entries) > _MAX_SHARDS:
        raise Refused(f"it has {len(entries)} shards, of {_MAX_SHARDS} at most")
    shards = tuple(Shard.of_json(entry, f"shards[{i}]", dtype) for i, entry in enumerate(entries))
    counts = []
    for name in ("documents", "tokens"):
        counts.append(whole(name, values[name], 0, MAX_COUNT))
        total = sum(getattr(shard, name) for shard in shards)
        if counts[-1] != total:
            raise Refused(f"{name} is {counts[-1]}, its shards have {total}")
    tally = tally_of_json(values["left_out"], "left_out")
    tally.num_documents = counts[0]
    told = [_mapping(name, values[name]) for name in ("settings", "source")]
    return Index(counts[0], counts[1], dtype, recipe, told[0], told[1], tally, shards)


def _canonical(values: object) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _refuse_constant(name: str) -> None:
    raise Refused(f"{name} is no number of JSON")


def _mapping(where: str, value: object) -> dict[str, Any]:
    return instance(where, value, dict, "an object")


def _digest(where: str, value: object) -> None:
    if not (isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")):
        raise Refused(f"{where} is {shown(value)}; it must be 64 hexadecimal digits")
