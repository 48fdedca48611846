"""Hugging Face `datasets`: objects that exist already, and names of the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hsap.data.fields import Row
from hsap.data.sources.source import Reading, Tally, Turns

PREFIX = "hf:"


def is_dataset(value: object) -> bool:
    """Say whether a value is a data set (or a dict of splits) of Hugging Face's library, without importing it."""
    return (hasattr(value, "features") and hasattr(value, "__iter__")) or is_splits(value)


def is_splits(value: object) -> bool:
    """Say whether a value is a dict of data sets."""
    return isinstance(value, Mapping) and bool(value) and all(hasattr(one, "features") for one in value.values())


def read_dataset(dataset: Any, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Row]:
    """Walk the rows of a map-style or streamed data set; other readers' rows aren't decoded where that can be."""
    if is_splits(dataset):
        if len(dataset) != 1:
            raise ValueError(f"the data set has the splits {', '.join(map(str, dataset))}; give one of them")
        dataset = next(iter(dataset.values()))
    name = str(getattr(getattr(dataset, "info", None), "dataset_name", None) or "dataset")
    names = getattr(dataset, "column_names", None)
    if names:
        wanted = reading.fields.wanted(list(names))
        if len(wanted) < len(names):
            dataset = dataset.select_columns(wanted)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        numbered = ((index, dataset[index]) for index in turns.among(len(dataset)))
    else:
        numbered = ((index, values) for index, values in enumerate(dataset) if turns.take())
    for index, values in numbered:
        yield Row(dict(values), f"{name}:row {index}", f"{name}:{index}")


def load(path: str) -> Any:
    """Load "hf:NAME#SPLIT" (or "hf:NAME@CONFIG#SPLIT") as a stream.

    Errors (ValueError): the library isn't installed; it can't load that; no split is named.
    """
    named, _, split = path.removeprefix(PREFIX).partition("#")
    name, _, config = named.partition("@")
    if not name or not split:
        raise ValueError(f"data set {path}: write hf:NAME#SPLIT, as in hf:allenai/c4@en#train")
    try:
        # By name, because a folder datasets/ in the working directory answers `import datasets`, too.
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f'data set {path} is read by Hugging Face\'s datasets: pip install "hsap[hf]"') from error
    try:
        return load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:  # the library raises its own, fsspec's and the hub's
        told = " ".join(str(error).split())[:300]
        raise ValueError(f"data set {path} can't be loaded ({type(error).__name__}: {told})") from error
