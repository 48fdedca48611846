"""Tensors in files: pieces of flattened parameters, read by their place."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hsap.ir.check import one_line

RANDOM = "random"
"""The kind of a rank's random state; pieces of all other kinds are numbers in float32."""
_MOST = 1 << 62
_NUMBER = "([0-9]{1,18})"
_PIECE = re.compile(rf"([^:]*):{_NUMBER}(?:\+{_NUMBER}/{_NUMBER}/{_NUMBER})?:(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a piece of some columns of a matrix lies in the flattened whole.

    The columns' elements, row by row: `width` of every `stride`, the first at `start`. A piece begins with the one
    numbered `skip` among them.
    """

    start: int
    skip: int
    width: int
    stride: int

    def last(self, numel: int) -> int:
        """Place in the whole behind the last row that a piece of so many elements has a part of."""
        return self.start + ((self.skip + numel) // self.width + 1) * self.stride

    def places(self, first: int, numel: int) -> Tensor:
        """Places in the whole of elements [first, first + numel) of the piece."""
        number = torch.arange(self.skip + first, self.skip + first + numel)
        return self.start + number // self.width * self.stride + number % self.width


def key(kind: str, name: str, start: int | Columns) -> str:
    """Name, in a file, of a piece of a flattened parameter: elements from `start` on, or of some columns."""
    if isinstance(start, Columns):
        return f"{kind}:{start.start}+{start.skip}/{start.width}/{start.stride}:{name}"
    return f"{kind}:{start}:{name}"


class Pieces:
    """The pieces of a checkpoint's files, read by parameter and place; files are mapped, not read as a whole.

    ValueError: a file that isn't safetensors, or holds something else than pieces, or what another has too.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = []
        self._pieces: dict[tuple[str, str], list[tuple[int, int, int, str]]] = defaultdict(list)
        self._columns: dict[tuple[str, str], list[tuple[Columns, int, int, str]]] = defaultdict(list)
        for number, path in enumerate(paths):
            try:
                file = safe_open(str(path), "pt")
            except SafetensorError as error:
                raise ValueError(
                    f"{path} isn't a safetensors file ({error}); resume from another checkpoint"
                ) from error
            self._files.append(file)
            for entry in file.keys():  # noqa: SIM118  (not a mapping)
                self._add(path, number, entry)
        for (kind, name), pieces in self._pieces.items():
            pieces.sort()
            if (kind, name) in self._columns or any(a[1] > b[0] for a, b in itertools.pairwise(pieces)):
                raise _twice(kind, name)

    def _add(self, path: Path, number: int, entry: str) -> None:
        """Note where a file's entry belongs."""
        piece, part = _PIECE.fullmatch(entry), self._files[number].get_slice(entry)
        shape = part.get_shape()
        kind = piece[1] if piece else ""
        if piece is None or len(shape) != 1 or part.get_dtype() != ("U8" if kind == RANDOM else "F32"):
            raise ValueError(
                f"{path} holds {one_line(entry)}, {part.get_dtype()} {shape}, which is no piece of a flattened "
                "parameter; resume from another checkpoint"
            )
        start, *columns, name = piece.groups()[1:]
        if columns[0] is None:
            self._pieces[kind, name].append((int(start), int(start) + shape[0], number, entry))
            return
        its = Columns(int(start), *map(int, columns))
        if not 0 < its.width <= its.stride - its.start or its.last(shape[0]) > _MOST:
            raise ValueError(f"{path} holds {one_line(entry)}, whose columns can't be; resume from another checkpoint")
        self._columns[kind, name].append((its, shape[0], number, entry))

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened parameter; ValueError where no file holds some of them."""
        if (kind, name) in self._columns:
            return self._from_columns(kind, name, start, numel)
        parts, at, end = [], start, start + numel
        for first, last, number, entry in self._pieces.get((kind, name), ()):
            if first <= at < min(last, end):
                parts.append(self._files[number].get_slice(entry)[at - first : min(last, end) - first])
                at = min(last, end)
        if at < end:
            raise _lacking(kind, name, at, start, end)
        return torch.cat(parts) if parts else torch.empty(0)

    def read_part(self, kind: str, name: str, start: int | Columns, numel: int) -> Tensor:
        """So many elements of a flattened parameter from `start` on, or of some of its columns."""
        if isinstance(start, int) or not numel:
            return self.read(kind, name, start if isinstance(start, int) else 0, numel)
        places = start.places(0, numel)
        first = int(places[0])
        return self.read(kind, name, first, int(places[-1]) + 1 - first)[places - first]

    def _from_columns(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Elements of a parameter whose pieces are columns."""
        out, found = torch.empty(numel), torch.zeros(numel, dtype=torch.bool)
        for columns, held, number, entry in self._columns[kind, name]:
            places = columns.places(0, held) - start
            here = (places >= 0) & (places < numel)
            if bool(here.any()):
                if bool(found[places[here]].any()):
                    raise _twice(kind, name)
                out[places[here]] = self._files[number].get_tensor(entry)[here].to(out.dtype)
                found[places[here]] = True
        if not bool(found.all()):
            raise _lacking(kind, name, start + int(found.int().argmin()), start, start + numel)
        return out

    def whole(self, kind: str, name: str) -> Tensor | None:
        """All of an entry, None if there is none."""
        pieces = self._pieces.get((kind, name))
        return None if not pieces else self.read(kind, name, 0, pieces[-1][1])


def _twice(kind: str, name: str) -> ValueError:
    return ValueError(
        f"the checkpoint holds some of {kind} of {one_line(name)} twice, and nothing says which holds; resume from "
        "another checkpoint"
    )


def _lacking(kind: str, name: str, at: int, start: int, end: int) -> ValueError:
    return ValueError(
        f"the checkpoint lacks {kind} of {name} from element {at} of {start} to {end}; it is of another model, "
        "or one of its files is: resume from another checkpoint"
    )
