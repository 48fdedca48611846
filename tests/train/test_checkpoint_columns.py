"""Pieces of some columns of a matrix: written by any ranks, read at any place."""

import itertools

import pytest
import torch

from hsap.tensorfile import write_tensors
from hsap.train.checkpoints.tensors import Columns, Pieces, key

ROWS, COLUMNS = 5, 11
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def write(folder, borders, cuts):
    """A file for each run of columns, its elements in pieces that begin wherever ZeRO may have cut."""
    paths = []
    for i, (first, stop) in enumerate(itertools.pairwise(borders)):
        flat = MATRIX[:, first:stop].flatten()
        ends = [0, *(cut for cut in cuts if cut < len(flat)), len(flat)]
        pieces = {
            key("fp32", "w", Columns(first, a, stop - first, COLUMNS)): torch.tensor(flat[a:b].tolist())
            for a, b in itertools.pairwise(ends)
        }
        paths.append(folder / f"rank{i}.safetensors")
        write_tensors(paths[-1], pieces)
    return paths


@pytest.mark.parametrize("cuts", [(), (1,), (7, 8), (12,)])
def test_any_range_is_read(tmp_path, cuts):
    pieces = Pieces(write(tmp_path, [0, 4, 5, 11], cuts))
    whole = MATRIX.reshape(-1)
    for start, numel in itertools.product(range(0, 55, 6), (0, 1, 13, 55)):
        numel = min(numel, 55 - start)
        assert torch.equal(pieces.read("fp32", "w", start, numel), whole[start : start + numel])
    for first, stop in ((0, 6), (6, 11), (10, 11)):
        mine = MATRIX[:, first:stop].reshape(-1)
        for skip, numel in itertools.product((0, 3), (0, 1, len(mine) - 3)):
            place = Columns(first, skip, stop - first, COLUMNS)
            assert torch.equal(pieces.read_part("fp32", "w", place, numel), mine[skip : skip + numel])


def test_what_is_lacking_is_said(tmp_path):
    paths = write(tmp_path, [0, 4, 11], (9,))
    with pytest.raises(ValueError, match="lacks fp32 of w from element 4 of 0 to 55"):
        Pieces(paths[:1]).read("fp32", "w", 0, 55)


HUGE = "9" * 18


@pytest.mark.parametrize(
    "entry",
    [
        *("fp32:0+0/0/5:w", "fp32:0+0/6/5:w", "fp32:3+0/4/5:w", "fp32:5+0/1/5:w"),
        *(f"fp32:0+{HUGE}/1/{HUGE}:w", f"fp32:{HUGE}+0/1/1:w", f"fp32:0+0/1/{HUGE}:w"),
    ],
)
def test_columns_that_can_t_be_are_refused(tmp_path, entry):
    write_tensors(tmp_path / "rank0.safetensors", {entry: torch.zeros(4)})
    with pytest.raises(ValueError, match="whose columns can't be"):
        Pieces([tmp_path / "rank0.safetensors"])


@pytest.mark.parametrize(
    "entries",
    [
        {"fp32:0+0/2/5:w": 4, "fp32:1+0/4/5:w": 8},
        {"fp32:0+0/2/5:w": 4, "fp32:0+2/2/5:w": 4, "fp32:2+0/3/5:w": 6},
        {"fp32:0+0/5/5:w": 10, "fp32:0:w": 10},
        {"fp32:0:w": 6, "fp32:5:w": 5},
    ],
)
def test_what_is_there_twice_is_refused(tmp_path, entries):
    """Ten elements, some of them in two pieces, which may differ."""
    write_tensors(tmp_path / "rank0.safetensors", {name: torch.zeros(n) for name, n in entries.items()})
    with pytest.raises(ValueError, match="holds some of fp32 of w twice"):
        Pieces([tmp_path / "rank0.safetensors"]).read("fp32", "w", 0, 10)
