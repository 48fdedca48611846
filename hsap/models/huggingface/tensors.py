"""Weights of a folder: which file holds which tensor, checked by the files' headers before a number is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hsap.models.config import ModelConfig
from hsap.models.huggingface.reading import read_json
from hsap.models.llama import EMBEDDING, HEAD, shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_READABLE = ("F64", "F32", "F16", "BF16")
# Frequencies of rotary embedding, which follow from the config: files of 2023 hold them.
_DERIVED = ".rotary_emb.inv_freq"
_SHOWN = 5


class Weights:
    """The tensors of a folder by name. Files are mapped into memory, not read as a whole.

    ValueError: no safetensors, a file that isn't whole, an index that names files elsewhere or doesn't fit its files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, safe_open] = {}
        self._homes: dict[str, str] = {}
        index = _index(self.folder)
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            opened = self._files[file] = _open(self.folder / file)
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                if name in self._homes:
                    raise ValueError(
                        f"{self._where(name)} and also in {self.folder / file}: take it out of one of them"
                    )
                self._homes[name] = file
        for name, file in (index or {}).items():
            if self._homes.get(name) != file:
                raise ValueError(
                    f"{self.folder / INDEX} says that {file} holds {name}, and it doesn't; copy the folder anew from "
                    "where it is whole"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def read(self, name: str) -> Tensor:
        """Give a tensor as it is in its file."""
        return self._files[self._homes[name]].get_tensor(name)

    def check(self, config: ModelConfig) -> None:
        """Refuse, by ValueError, weights that aren't those of such a model: it lists what is missing, or too much."""
        if config.num_layers > len(self._homes):
            raise ValueError(
                f"config.json in {self.folder} says num_hidden_layers {config.num_layers}, and the files there hold "
                f"{len(self._homes)} tensors in all; copy config.json and weights from the same model"
            )
        expected = shapes(config)
        missing = [name for name in expected if name not in self]
        more = [name for name in self if name not in expected and not name.endswith(_DERIVED)]
        if config.tied_embeddings and HEAD in more:
            more.remove(HEAD)
        faults = [f"{what} {_listed(names)}" for what, names in (("lacks", missing), ("has also", more)) if names]
        if faults:
            raise ValueError(
                f"the weights in {self.folder} aren't those of its config.json: the folder {' and '.join(faults)}; "
                "copy config.json and weights from the same model"
            )
        for name, like in expected.items():
            self._check_one(name, tuple(like.shape))
        if config.tied_embeddings and HEAD in self and not self._is_embedding(HEAD):
            raise ValueError(
                f"{self._where(HEAD)} isn't {EMBEDDING}, but tie_word_embeddings in config.json says that they are "
                "one; set it to false there, or take the tensor out"
            )

    def _is_embedding(self, name: str) -> bool:
        tensor, embedding = self.read(name), self.read(EMBEDDING)
        return tensor.dtype == embedding.dtype and torch.equal(tensor, embedding)

    def _check_one(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._files[self._homes[name]].get_slice(name)
        has = tuple(entry.get_shape())
        if has != shape:
            raise ValueError(
                f"{self._where(name)} has the shape {has}, and by config.json it must have {shape}; copy config.json "
                "and weights from the same model"
            )
        if entry.get_dtype() not in _READABLE:
            raise ValueError(
                f"{self._where(name)} is of type {entry.get_dtype()}, and none of {', '.join(_READABLE)}: quantised "
                "weights can't be trained; take the model's folder as it was before"
            )

    def _where(self, name: str) -> str:
        return f"{name} in {self.folder / self._homes[name]}"


def _index(folder: Path) -> Mapping[str, str] | None:
    """Files by the tensors they hold, None where one file holds all."""
    if (folder / SINGLE).is_file():
        return None
    path = folder / INDEX
    if not path.is_file():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        hint = f" ({pickled[0]} is a pickle, which could run code when read: convert it first)" if pickled else ""
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}; give a folder with safetensors")
    homes = read_json(path).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise ValueError(f"{path} has no weight_map from tensors to files; copy it anew from where it is whole")
    for name, file in homes.items():
        plain = isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0:")
        if not plain:
            raise ValueError(f"{path} says that {name} is in {file!r}, which is no name of a file beside it")
    return homes


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the folder anew from where it is whole")
    try:
        return safe_open(str(path), "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} isn't a whole safetensors file ({error}); copy it anew from where it is whole"
        ) from error


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
