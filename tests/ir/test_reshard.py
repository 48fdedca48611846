"""Sizes of AllToAlls at once against their pieces one by one."""

import numpy as np
import pytest

from hsap.ir.heads import HeadShape
from hsap.ir.precision import Precision
from hsap.ir.program import Role
from hsap.ir.reshard import exchanged_bytes, reshard


@pytest.mark.parametrize("to_column", [True, False])
@pytest.mark.parametrize("role", [Role.Q, Role.KV, Role.O, Role.DKV])
def test_what_is_exchanged_are_the_pieces(role, to_column) -> None:
    heads, precision = HeadShape(9, 3, 8, "bf16"), Precision.of("bf16", "fp32")
    tokens = np.array([[5, 0, 7, 1], [0, 0, 0, 0], [2, 3, 3, 100]])
    found = exchanged_bytes(role, to_column, heads, precision, tokens)
    for group, own in enumerate(tokens.tolist()):
        for rank in range(len(own)):
            laid = reshard(role, to_column, heads, precision, own, rank)
            sent = {p.peer: p.num_bytes for p in laid.sends if p.peer != rank}
            received = {p.peer: p.num_bytes for p in laid.receives if p.peer != rank}
            assert sent == {peer: found[group, rank, peer] for peer in sent}
            assert received == {peer: found[group, peer, rank] for peer in received}
            assert found[group, rank, rank] == 0
