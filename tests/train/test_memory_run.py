"""Training with everything that saves memory, sharded over ranks and ZeRO 3, is training without any of it."""

import pytest

from hsap.data.packing.settings import Packing
from hsap.train.capacity import Capacity
from hsap.train.inputs import check
from tests.parity import Case, arguments, compare, write_data
from tests.parity.rank import configure
from tests.train.worlds import run_world

SAVING = [
    *("model.checkpointing=full", "model.mlp_chunk_tokens=17", "model.loss_chunk_tokens=24"),
    *("model.loss_chunk_vocab=300", "train.pad_rows=true"),
]


@pytest.mark.slow
def test_two_by_two_under_zero_3_is_one_process(tmp_path):
    data = write_data(tmp_path)
    base, sharded = Case("1x1", zero_stage=0), Case("2x2", zero_stage=3)
    run_world(1, [arguments(base, data, tmp_path / "base", 4)], tmp_path)
    run_world(4, [[*arguments(sharded, data, tmp_path / "saving", 4), *SAVING]], tmp_path)
    difference = compare(tmp_path / "base", tmp_path / "saving")
    assert difference.ok, difference


def test_capacity_is_one_number_for_all_packs_that_are_dealt_evenly():
    packing = Packing(8192, curriculum=((10, 16384),))
    capacity = Capacity.of(packing, 2, 8)
    assert (capacity.even, capacity.rows, capacity.step) == (4096, 4352, 256)
    assert {capacity.padded(rows) for rows in (0, 1, 4096, 4300, 4352)} == {4352}
    assert [capacity.padded(rows) for rows in (4353, 4608, 4609)] == [4608, 4608, 4864]
    small = Capacity.of(Packing(5), 1, 8)
    assert small.even == 1 and small.rows == 16 and small.padded(17) == 32


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["model.checkpointing=full", "model.offload_checkpoints=true"], "offload_checkpoints=true .*device=cpu"),
        (["model.compile=true", "engine.zero_stage=3"], "compile=true with engine.zero_stage=3"),
        (["model.offload_checkpoints=true"], "model.checkpointing is none"),
        (["model.mlp_chunk_tokens=0"], "model.mlp_chunk_tokens=0: expected a whole number of at least 1, or null"),
        (["model.loss_chunk_vocab=0"], "model.loss_chunk_vocab=0"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_start(tmp_path, more, told):
    settings = arguments(Case("1x1"), write_data(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match=told):
        check(configure([*settings, *more], 1))
