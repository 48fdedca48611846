"""The paper's printed streams, and what the verifier says of transfers without a partner."""

import pytest

import hsap
from hsap.ir.listing import Line, Listing
from hsap.ir.program import Op, Role
from tests.ir.test_text import RANK_0, RANK_3


def test_the_paper_s_listings_are_rejected_with_what_is_missing():
    report = hsap.verify(hsap.parse(RANK_0 + "… …\n" + RANK_3 + "… …\n"))
    assert not report.ok
    assert [(f.rank, f.instruction, f.message) for f in report.errors] == [
        (0, 0, "awaits q from rank 3, which never sends it"),
        (0, 14, "sends kv to rank 3, which never receives it"),
    ]
    assert "rank   0  [R]" in str(report) and "[S]" in str(report)


@pytest.mark.parametrize("listing", [RANK_0, RANK_3])
def test_transfers_with_ranks_that_are_not_listed_are_not_judged(listing):
    report = hsap.verify(hsap.parse(listing))
    assert report.ok and str(report).startswith("ok: ")


def found(*streams) -> list[str]:
    rows = []
    for rank, lines in enumerate(streams):
        ops = {"s": Op.SEND, "r": Op.RECV}
        rows.append((rank, tuple(Line(i, ops[op], role, peer, ()) for i, (op, role, peer) in enumerate(lines))))
    report = hsap.verify(Listing(tuple(rows)))
    return [f"rank {f.rank}, instruction {f.instruction}: {f.message}" for f in report.errors]


def test_transfers_that_match_in_number_and_order():
    assert found([("s", Role.KV, 1), ("s", Role.Q, 1)], [("r", Role.KV, 0), ("r", Role.Q, 0)]) == []
    assert found([("s", Role.KV, 1), ("s", Role.Q, 1)], [("r", Role.Q, 0), ("r", Role.KV, 0)]) == [
        "rank 0, instruction 0: sends kv to rank 1, which at that place (its instruction 0) awaits q",
    ]
    assert found([("s", Role.KV, 1)] * 3, [("r", Role.KV, 0)]) == [
        "rank 0, instruction 1: sends kv to rank 1, which receives kv from it only 1×",
        "rank 0, instruction 2: sends kv to rank 1, which receives kv from it only 1×",
    ]
    assert found([("s", Role.O, 1)], [("r", Role.O, 0)] * 2) == [
        "rank 1, instruction 1: awaits o from rank 0, which sends it o only 1×",
    ]
