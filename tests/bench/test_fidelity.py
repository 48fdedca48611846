"""The fidelity bench: how it judges, what it keeps, and that it runs."""

import json
from dataclasses import replace

import pytest

from hsap import clusters
from tests.bench import fidelity, namespaces
from tests.bench.fidelity import Row

NO_NODES = namespaces.refusal()


def test_rows_are_judged_by_error_and_by_order() -> None:
    rows = [
        Row("a", "x", 1.0, 1.0, 1.1),
        Row("a", "y", 1.1, 1.0, 0.9),  # not clearly apart from x
        Row("a", "z", 2.0, 1.0, 1.0),  # slower than y as predicted, but not than x
        Row("b", "x", 4.0, 1.0, 4.4),
    ]
    found = fidelity.judge(rows)
    assert found["median_error"] == pytest.approx((0.1 + 0.2 / 1.1) / 2)
    assert (found["pairs"], found["pairs_in_order"]) == (2, 0.5)
    assert (found["pairs_of_all"], found["pairs_of_all_in_order"]) == (5, 0.8)
    assert fidelity.judge(rows, "fastest_s")["pairs"] == 0
    lines = fidelity.table(rows).splitlines()
    assert len(lines) == 5 and "+10.0%" in lines[1]


@pytest.mark.slow
def test_real_runs_are_compared(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(fidelity, "PACKS", {"small": ((40, 7, 90), "causal")})
    monkeypatch.setattr(fidelity, "PLANNERS", ("ring", "sap"))
    path = tmp_path / "mine.yaml"
    clusters.write(clusters.read("cpu-gloo"), path, {}, "")
    assert fidelity.main(["--turns", "2", "--cluster", str(path)], tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("\nsmall ") == 2 and "median_error" in out
    (line,) = (tmp_path / "fidelity.jsonl").read_text(encoding="utf-8").splitlines()
    assert [row[:2] for row in json.loads(line)["figures"]["rows"]] == [["small", "ring"], ["small", "sap"]]
    assert all(0 < row[3] <= row[2] < 10 for row in json.loads(line)["figures"]["rows"])
    assert json.loads(line)["figures"]["nodes"] == 1


def test_ranks_that_are_no_whole_nodes_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        fidelity.main(["--nodes", "2", "--ranks", "3"])
    assert "equally many on each of 2 nodes" in capsys.readouterr().err


@pytest.mark.skipif(NO_NODES is not None, reason=str(NO_NODES))
@pytest.mark.slow
def test_real_runs_over_nodes_are_compared(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(fidelity, "PACKS", {"small": ((40, 7, 90), "causal")})
    monkeypatch.setattr(fidelity, "PLANNERS", ("ring",))
    path = tmp_path / "mine.yaml"
    clusters.write(replace(clusters.read("cpu-gloo"), ranks_per_node=1, inter_bytes_per_s=1e8), path, {}, "")
    assert fidelity.main(["--nodes", "2", "--turns", "1", "--cluster", str(path)], tmp_path) == 0
    (line,) = (tmp_path / "fidelity.jsonl").read_text(encoding="utf-8").splitlines()
    figures = json.loads(line)["figures"]
    assert (figures["nodes"], figures["ranks"], figures["cluster"]["ranks_per_node"]) == (2, 2, 1)
    assert figures["time_sliced"] == (figures["cores"] < 2)
    assert "on 2 emulated nodes" in capsys.readouterr().out
