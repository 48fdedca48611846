"""ZeRO-3 gathers parameters by module hooks and collectives: ranks with unequal rows must train as one process does."""

from pathlib import Path

import pytest

from tests.train.worlds import World, script


@pytest.mark.slow
def test_two_partitioned_ranks_equal_one_process(tmp_path):
    World(tmp_path, 2, [str(Path(__file__).with_name("zero3_rank.py"))], script).finish()
