"""`hsap estimate` at its door."""

import json

import pytest

from hsap.cli import main
from hsap.ir.check import Refused
from hsap.tune.attention import Attention, Sampled

TINY = ["estimate", "--model", "tiny", "--cluster", "cpu-gloo", "--ranks-per-node", "4"]


def rows(capsys, *arguments: str) -> list[dict]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_the_longest_pack_fits_and_no_longer_one(capsys) -> None:
    found = {row["topology"]: row for row in rows(capsys, *TINY)}
    assert set(found) == {"1x1", "2x1", "1x2", "4x1", "2x2", "1x4"}
    capacity = 4_000_000_000
    for topology, row in found.items():
        ranks, longest = 4 // row["dp"], row["pack_tokens"]
        assert 0.999 * capacity < sum(row["memory_bytes"].values()) <= capacity
        fixed = [*TINY, "--topology", topology]
        assert rows(capsys, *fixed, "--seq-len", str(longest))[0]["pack_tokens"] == longest
        assert main([*fixed, "--seq-len", str(longest + ranks)]) == 2
        told = capsys.readouterr().err
        assert f"a pack of {longest + ranks:,} tokens fits nowhere that was asked for" in told and "largest" in told
    assert 3.9 < found["4x1"]["pack_tokens"] / found["1x1"]["pack_tokens"] < 4.1


def test_what_is_fixed_stays_and_full_checkpointing_holds_most(capsys) -> None:
    lengths = {}
    for how in ("none", "selective", "full"):
        (row,) = rows(capsys, *TINY, "--topology", "2x2", "--zero", "1", "--checkpointing", how)
        assert (row["zero_stage"], row["checkpointing"]) == (1, how)
        lengths[how] = row["pack_tokens"]
    assert lengths["none"] < lengths["selective"] < lengths["full"]


def test_planned_packs_are_no_longer_than_even_ones(tmp_path, capsys) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([40_000, 9_000, 700, 90, 12_000]), encoding="utf-8")
    fixed = [*TINY, "--topology", "2x1", "--checkpointing", "none"]
    (even,), (planned,) = (
        rows(capsys, *fixed, *more) for more in ((), ("--data", str(tmp_path / "lengths.json"), "--planner", "sap"))
    )
    assert 0 < planned["pack_tokens"] <= even["pack_tokens"]


def test_a_fixed_length_takes_what_its_plan_fits_in(tmp_path, capsys, monkeypatch) -> None:
    """Even, a pack fits without checkpointing; its plans take twice the arena, so that it needs some."""
    (tmp_path / "lengths.json").write_text("[300, 200]", encoding="utf-8")
    fixed = [*TINY, "--topology", "2x1", "--zero", "0"]
    (even,) = rows(capsys, *fixed, "--checkpointing", "none")
    longest = even["pack_tokens"]
    told = Sampled(tokens=-(-longest // 2), arena_bytes=int(even["memory_bytes"]["communication arena"] / 12 * 16))
    monkeypatch.setattr(Attention, "sampled", lambda *_: told)
    more = ["--data", str(tmp_path / "lengths.json"), "--seq-len", str(longest)]
    assert main([*fixed, "--checkpointing", "none", *more]) == 2
    lacking = capsys.readouterr().err.partition(" a rank, ")[2]
    assert lacking.startswith("0.4") and " more than it has" in lacking
    (row,) = rows(capsys, *fixed, *more)
    assert (row["pack_tokens"], row["checkpointing"], row["arena_multiple"]) == (longest, "selective", 24)
    assert sum(row["memory_bytes"].values()) <= 4_000_000_000


def test_a_planner_that_refuses_one_topology_leaves_the_others(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "lengths.json").write_text("[300, 200]", encoding="utf-8")
    sampled = Attention.sampled

    def refusing(self, shape, planner):
        if shape.topology.inter_sp > 1:
            raise Refused("these heads don't go round")
        return sampled(self, shape, planner)

    monkeypatch.setattr(Attention, "sampled", refusing)
    more = ["--data", str(tmp_path / "lengths.json"), "--seq-len", "500"]
    assert {row["topology"] for row in rows(capsys, *TINY, *more)} == {"1x1", "1x2", "1x4"}
    assert main([*TINY, *more, "--topology", "2x2"]) == 2
    assert "1x2x2: these heads don't go round" in capsys.readouterr().err


def test_a_table_of_items(capsys) -> None:
    assert main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tiny on 1 x cpu-gloo (4 ranks of 3.7 GiB), fp32" in lines[0] and "longest pack" in lines[2]
    assert len(lines) == 3 + 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--topology", "3x1"), "3x1 is none of the topologies of 4 ranks"),
        (("--topology", "9"), "--topology"),
        (("--model", "huggingface"), "known models are gpt-30b, llama2-7b, smollm2-135m, tiny"),
        (("--topology", "4x1", "--seq-len", "3"), "4x1 has more ranks than a pack of 3 has tokens"),
        (("--seq-len", "0"), "--seq-len"),
        (("--seed", "-1"), "--seed is -1"),
    ],
)
def test_an_impossible_ask_is_named(capsys, arguments, told) -> None:
    assert main([*TINY, *arguments]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_a_model_that_fits_nowhere_says_what_it_takes(capsys) -> None:
    assert main(["estimate", "--model", "llama2-7b", "--cluster", "dgx-a100", "--zero", "0"]) == 2
    said = capsys.readouterr().err
    assert "a pack of 1 token fits nowhere" in said and "largest item is Adam moments" in said
