"""Tensors in files: pieces of flattened parameters, written as safetensors with their checksum and read by place."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hsap.files import Written, write
from hsap.ir.check import one_line

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
_PIECE = re.compile(r"([^:]*):([0-9]{1,18}):(.*)", re.DOTALL)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write tensors, float32 or uint8, any device, as a safetensors file that is on the disk when this returns.

    One at a time, so that memory holds no second copy of them.
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write(path, chain((len(text).to_bytes(8, "little"), text), map(_bytes, tensors.values())))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1))


def key(kind: str, name: str, start: int) -> str:
    """Name, in a file, of a piece of a flattened parameter that begins with element `start`."""
    return f"{kind}:{start}:{name}"


class Pieces:
    """The pieces of a checkpoint's files, read by parameter and place; files are mapped, not read as a whole.

    ValueError: a file that isn't safetensors, or holds something else than pieces.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = []
        self._pieces: dict[tuple[str, str], list[tuple[int, int, int, str]]] = defaultdict(list)
        for number, path in enumerate(paths):
            try:
                file = safe_open(str(path), "pt")
            except SafetensorError as error:
                raise ValueError(
                    f"{path} isn't a safetensors file ({error}); resume from another checkpoint"
                ) from error
            self._files.append(file)
            for entry in file.keys():  # noqa: SIM118  (not a mapping)
                piece, part = _PIECE.fullmatch(entry), file.get_slice(entry)
                if piece is None or len(part.get_shape()) != 1 or part.get_dtype() not in _DTYPES.values():
                    raise ValueError(
                        f"{path} holds {one_line(entry)}, {part.get_dtype()} {part.get_shape()}, which is no piece of "
                        f"a flattened parameter; resume from another checkpoint"
                    )
                kind, start, name = piece.groups()
                self._pieces[kind, name].append((int(start), int(start) + part.get_shape()[0], number, entry))
        for pieces in self._pieces.values():
            pieces.sort()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened parameter; ValueError where no file holds some of them."""
        parts, at, end = [], start, start + numel
        for first, last, number, entry in self._pieces.get((kind, name), ()):
            if first <= at < min(last, end):
                parts.append(self._files[number].get_slice(entry)[at - first : min(last, end) - first])
                at = min(last, end)
        if at < end:
            raise ValueError(
                f"the checkpoint lacks {kind} of {name} from element {at} of {start} to {end}; it is of another model, "
                "or one of its files is: resume from another checkpoint"
            )
        return torch.cat(parts) if parts else torch.empty(0)

    def whole(self, kind: str, name: str) -> Tensor | None:
        """All of an entry, None if there is none."""
        pieces = self._pieces.get((kind, name))
        return None if not pieces else self.read(kind, name, 0, pieces[-1][1])
