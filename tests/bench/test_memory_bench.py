"""The memory bench: what real runs allocate is what the model of memory says, and falls as ranks share it."""

from hsap.ir.problem import Topology
from tests.bench import memory
from tests.bench.allocations import _held, _move


def test_counted_allocations_are_within_the_bar(capsys) -> None:
    wanted = [
        memory.Case("tiny", "2x1", 3, "bf16", "full", 300, 2),
        memory.Case("deep", "1x2", 2, "fp32", "selective", 64, 1),
        memory.Case("tiny", "2x1", 0, "bf16", "none", 400, 1, (("model.loss_chunk_vocab", 300),)),
    ]
    rows = memory.measure(wanted)
    assert [row["topology"] for row in rows] == ["2x1", "1x2", "2x1"]
    for row in rows:
        assert abs(row["predicted_bytes"] / row["counted_bytes"] - 1) < memory.BAR
        assert sum(row["counted"].values()) == row["counted_bytes"], "the parts are all there is"
        for mine, theirs in (
            ("weights", "weights"),
            ("Adam moments", "Adam moments"),
            ("arena", "communication arena"),
        ):
            assert abs(row["predicted"][theirs] - row["counted"][mine]) <= 0.01 * row["counted"][mine] + 2048
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_a_tensor_in_another_s_place_has_freed_it() -> None:
    alive = {}
    grown = [_move(alive, *move) for move in ((7, 100), (9, 50), (7, 80), (9, -50), (9, -50), (8, 0))]
    assert grown == [100, 50, -20, -50, 0, 0] and alive == {7: 80, 8: 0}
    held = _held([(0, 7, 100), (1, 9, 50), (2, 11, 50), (3, 7, -100)], {9: "arena"})
    assert held == {"parts": {"arena": 50, "else": 50}, "largest": [(50, 1)]}


def test_rows_are_varied_and_repeat() -> None:
    rows = memory.cases(quick=False)
    assert len(set(rows)) == len(rows) and {row.checkpointing for row in rows} == set(memory.CHECKPOINTING)
    assert {(row.zero_stage, row.dtype) for row in rows} == {(z, d) for z in range(4) for d in memory.DTYPES}
    assert memory.drawn(9) == memory.drawn(9) and len(set(memory.drawn(9))) > 6
    for row in rows + memory.drawn(30):
        assert row.model.num_q_heads >= Topology.parse(row.topology).intra_sp
