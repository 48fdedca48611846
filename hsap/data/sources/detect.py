"""Detect: which format a data set is in, by content first and by suffix where content doesn't tell, and its files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hsap.data.sources import columns, flat, jsonl, mds, megatron, text
from hsap.data.sources.source import Reader
from hsap.data.sources.stream import PACKED, UTF8_MARK, compression_of, opened, told_at

READERS: dict[str, Reader] = {
    "json": jsonl.read_json,
    "parquet": columns.read_parquet,
    "arrow": columns.read_arrow,
    "megatron": megatron.read_megatron,
    "bin": flat.read_bin,
    "npy": flat.read_npy,
    "datatrove": flat.read_datatrove,
    "mds": mds.read_mds,
    "text": text.read_text,
    "source_tree": text.read_tree,
    "source_trees": text.read_tree,
}
"""The formats by the names that data.format takes."""
FORMATS = tuple(READERS)
PREPARED = "prepared.json"
"""The index of data that is tokenised already, which isn't read as a source (`hsap.data.prepared`)."""
SUFFIXES = {
    "json": (
        ".jsonl",
        ".ndjson",
        *(f"{suffix}{packed}" for suffix in (".jsonl", ".ndjson", ".json") for packed in PACKED),
    ),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".arrows", ".ipc", ".feather"),
    "megatron": (".idx",),
    "bin": (".bin",),
    "npy": (".npy",),
    "datatrove": (".ds",),
}
"""Files of a folder that are data. A bare .json is only if there is nothing else: most are tokenizers or manifests."""
_TEXTS = tuple(f"{suffix}{packed}" for suffix in text.TEXT_SUFFIXES for packed in ("", *PACKED))
_PLAIN_TEXTS = tuple(f"{suffix}{packed}" for suffix in (".txt", ".text") for packed in ("", *PACKED))
_MAGICS = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"FEA1", "arrow"),
    (megatron.MAGIC, "megatron"),
    (megatron.LEGACY_MAGIC, "megatron"),
    (flat.NPY_MAGIC, "npy"),
)
_NO_DATA = (".", "_", "cache-")
"""How names of hidden files begin, and of what table formats and `datasets` keep beside their data."""
_SETTING = f"set data.format to one of {', '.join(FORMATS)}"


def find(path: Path, format: str | None = None) -> tuple[str, list[Path]]:
    """Give the format of a data set and its files in the order in which they are read; no rows are read.

    format: the one to read it as, whatever it looks like. Errors (ValueError): nothing there; an unknown format; data
    that can't be told, or of several formats.
    """
    if format is not None and format not in READERS:
        raise ValueError(f"data.format={format!r}: there is no such format; {_SETTING}, or to null to have it detected")
    with told_at(lambda: path):
        if path.is_dir():
            return (format, _files_as(path, format)) if format else _folder(path)
        if path.is_file():
            return _file(path, format)
        index = path.with_name(path.name + ".idx")
        if index.is_file():
            return "megatron", [index]
        there = "is no regular file" if path.exists() else "doesn't exist"
    raise ValueError(f"data set {path} {there}; set data.path (or data.eval_path) to a file or a directory")


def unread(folder: Path, format: str, files: Sequence[Path]) -> list[Path]:
    """List data that lie in folders beside the files of this folder that are read: a file of each such folder."""
    if format not in SUFFIXES or any(file.parent != folder for file in files):
        return []
    bare = (".json",) if all(file.name.lower().endswith(".json") for file in files) else ()
    suffixes = (*(suffix for of_format in SUFFIXES.values() for suffix in of_format), *bare)
    found: list[Path] = []
    for below in _folders(folder):
        # What nobody may list, as a disk's lost+found, isn't known to be data.
        with suppress(OSError):
            deeper = (file for file in _below(below, suffixes, "index.json") if not file.name.startswith(_NO_DATA))
            found += [] if below.name.startswith(_NO_DATA) else islice(deeper, 1)
    return found


def _file(path: Path, format: str | None) -> tuple[str, list[Path]]:
    found = format or _format_of(path)
    if found == "megatron" and path.suffix == ".bin":
        path = path.with_suffix(".idx")
        if not path.is_file():
            raise ValueError(f"{path.with_suffix('.bin')} has no {path.name} beside it; copy both files")
    if found in ("source_tree", "source_trees"):
        raise ValueError(f"data.format={found}: {path} is a file; set data.path to a folder of source files")
    return found, [path]


def _format_of(path: Path) -> str:
    """Tell a file's format."""
    with open(path, "rb") as stream:
        head = stream.read(4096)
    for magic, format in _MAGICS:
        if head.startswith(magic):
            return format
    if head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{path} is a zip archive (.npz is one, too); unpack it and set data.path to what is in it")
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    if path.suffix == ".mds":
        raise ValueError(f"{path} is one shard of MDS; set data.path to the folder with its index.json")
    if path.name == "index.json" and _is_mds(path):
        return "mds"
    name = path.name.lower()
    by_suffix = next((format for format, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)
    if by_suffix is not None:
        return by_suffix
    if name.endswith(_TEXTS):
        return "text"
    if int.from_bytes(head[:4], "little") in flat.LLMC_VERSIONS:
        return "bin"
    if head[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    if compression_of(head):
        with told_at(lambda: f"{path}:1"), opened(path) as stream:
            head = stream.read(4096)
    begins = head.removeprefix(UTF8_MARK).lstrip()[:1]
    if begins in (b"{", b"[", b""):
        return "json"
    raise ValueError(f"{path} is of no format that its first bytes ({head[:8]!r}) or its name tell; {_SETTING}")


def _is_mds(index: Path) -> bool:
    try:
        return "shards" in json.loads(index.read_bytes())
    except (ValueError, TypeError, RecursionError):
        return False


def _folder(folder: Path) -> tuple[str, list[Path]]:
    """Tell a folder's format."""
    if (folder / PREPARED).is_file():
        raise ValueError(
            f"{folder} is a folder that `hsap prepare` made; it can be data.path alone, but not mixed with others "
            f"nor prepared again: prepare the mixture itself"
        )
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return "arrow", columns.saved_files(folder)
    if (folder / "index.json").is_file() and _is_mds(folder / "index.json"):
        return "mds", [folder / "index.json"]
    found = {format: _listed(folder, suffixes) for format, suffixes in SUFFIXES.items()}
    found["bin"] = [file for file in found["bin"] if not file.with_suffix(".idx").is_file()]
    found = {format: files for format, files in found.items() if files}
    if len(found) > 1:
        examples = ", ".join(f"{files[0].name} ({format})" for format, files in found.items())
        raise ValueError(
            f"the data set directory {folder} holds several formats: {examples}; a folder is read as one: "
            f"{_SETTING}, or data.path to one file"
        )
    if found:
        return next(iter(found.items()))
    return _loose_folder(folder)


def _loose_folder(folder: Path) -> tuple[str, list[Path]]:
    """Tell the format of a folder that has no data files itself: text, repositories, or nothing."""
    deeper = next(
        _below(folder, tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes), "index.json"), None
    )
    if deeper is not None:
        raise ValueError(
            f"the data set directory {folder} has data deeper, like {deeper}; set data.path to a folder or file there, "
            f"or data.format=source_tree to train on the whole tree as source text"
        )
    if any((folder / name).exists() for name in text.HISTORIES):
        return "source_tree", [folder]
    if any((below / name).exists() for below in _folders(folder) for name in text.HISTORIES):
        return "source_trees", _folders(folder)
    jsons = _listed(folder, (".json",))
    if jsons and next(_below(folder, _PLAIN_TEXTS), None) is not None:
        raise ValueError(
            f"the data set directory {folder} holds text and {jsons[0].name}; {_SETTING}, or data.path to one file"
        )
    if jsons:
        return "json", jsons
    texts = _texts(folder)
    if texts:
        return "text", texts
    suffixes = [suffix for of_format in SUFFIXES.values() for suffix in of_format]
    raise ValueError(
        f"the data set directory {folder} holds no file that ends in {', '.join((*suffixes, *text.TEXT_SUFFIXES))}; "
        f"set data.path (or data.eval_path) to a directory with such files, or to one file of any name; a folder of "
        f"source code is read with data.format=source_tree"
    )


def _files_as(folder: Path, format: str) -> list[Path]:
    """List the files of a folder that is of this format because the user says so."""
    special: dict[str, Callable[[], list[Path]]] = {
        "source_tree": lambda: [folder],
        "source_trees": lambda: _folders(folder),
        "text": lambda: _texts(folder),
        "mds": lambda: [index for index in [folder / "index.json"] if index.is_file()],
        "json": lambda: _listed(folder, SUFFIXES["json"]) or _listed(folder, (".json",)),
    }
    saved = format == "arrow" and any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if saved:
        files = columns.saved_files(folder)
    else:
        files = special.get(format, lambda: _listed(folder, SUFFIXES[format]))()
    if not files:
        wanted = {"source_trees": "a folder", "mds": "index.json", "text": ", ".join(_TEXTS)}
        raise ValueError(
            f"the data set directory {folder} holds no data of {format}: it has no "
            f"{wanted.get(format) or 'file that ends in ' + ', '.join(SUFFIXES[format])}; set data.path to what has"
        )
    return files


def _listed(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files of a folder by name, but those that aren't data (`_NO_DATA`)."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.lower().endswith(suffixes) and not file.name.startswith(_NO_DATA) and _is_file(file)
    )


def _texts(folder: Path) -> list[Path]:
    """List the text files at any depth, in linked folders, too."""
    return sorted(file for file in _below(folder, _TEXTS, linked=True) if _is_file(file))


def _is_file(path: Path) -> bool:
    """Say whether what is named like data is a file; a folder isn't. What is neither is an error, as a broken link is
    (OSError): a part of the data that can't be read."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(
            f"{path} is named like data and is no regular file; take it away, or set data.path to one file"
        )
    return stat.S_ISREG(mode)


def _folders(folder: Path) -> list[Path]:
    return sorted(below for below in folder.iterdir() if below.is_dir() and not below.name.startswith("."))


def _below(folder: Path, suffixes: tuple[str, ...], *names: str, linked: bool = False) -> Iterator[Path]:
    """Walk the files at any depth that have such a suffix or name. linked: in linked folders, but not back up."""

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=linked):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in text.HISTORIES and not (linked and _is_loop(root, name, folder))
        )
        for name in sorted(files):
            if (name.lower().endswith(suffixes) or name in names) and not name.startswith("."):
                yield Path(root, name)


def _is_loop(root: str, name: str, top: Path) -> bool:
    """Say whether a folder is a link to one of those that it is in, by the way from the top."""
    path = Path(root, name)
    above = [path.parent, *path.parent.parents]
    return path.is_symlink() and path.resolve() in {one.resolve() for one in above[: above.index(top) + 1]}
