"""What ranks tell each other: texts, numbers and bytes of any length, in the group's order."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hsap.gathering import broadcast_bytes, gather_tensors, gather_texts
from hsap.leak.ranks import Everywhere
from tests.runtime.ranks import run_ranks

TEXTS = ("", "naïve ✓", "x" * 1000)


def _tell(rank: int) -> list:
    odd = dist.new_group([1, 2])
    numbers = torch.arange(rank * 3, dtype=torch.float64) / 3
    told = [
        gather_texts(TEXTS[rank]),
        gather_texts(""),
        gather_tensors(numbers),
        broadcast_bytes(TEXTS[rank].encode(), 1).decode(),
    ]
    if rank:
        told += [gather_texts(TEXTS[rank], odd), broadcast_bytes(TEXTS[rank].encode(), 1, odd).decode()]
    own = [{}, {("a",): np.array([3.0, 1.0])}, {("a",): np.array([0.1, np.inf]), ("b", "c"): np.zeros(2)}][rank]
    for merged in (Everywhere(dist.group.WORLD).largest(own, 2), Everywhere(dist.group.WORLD).sums(own, 2)):
        told.append({"/".join(key): torch.from_numpy(array) for key, array in merged.items()})
    return told


@pytest.mark.slow
def test_all_ranks_get_what_each_has():
    for rank, told in enumerate(run_ranks(3, _tell)):
        assert told[0] == list(TEXTS) and told[1] == ["", "", ""] and told[3] == TEXTS[1]
        assert [numbers.tolist() for numbers in told[2]] == [[i / 3 for i in range(n)] for n in (0, 3, 6)]
        if rank:
            assert told[4:6] == [list(TEXTS[1:]), TEXTS[2]]
        largest, sums = ({key: array.tolist() for key, array in merged.items()} for merged in told[-2:])
        assert largest == {"a": [3.0, np.inf], "b/c": [0.0, 0.0]}
        assert sums == {"a": [3.1, np.inf], "b/c": [0.0, 0.0]}
