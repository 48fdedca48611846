"""`hsap simulate` at its door."""

import json

import pytest

from hsap.cli import main


@pytest.fixture
def plan(tmp_path):
    def make(name: str) -> str:
        path = str(tmp_path / name)
        assert main(["plan", "--lengths", "900,50,1200", "--topology", "4x1", "--json", "-o", path]) == 0
        return path

    return make


@pytest.mark.parametrize("name", ["a.plan", "a.txt"])
def test_figures(plan, name, capsys) -> None:
    path = plan(name)
    figures = json.loads(capsys.readouterr().out)
    assert main(["simulate", path, "--cluster", "dgx-h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["planner"], found["topology"], found["cluster"]) == ("sap", "4x1", "dgx-h100")
    assert found["forward"]["bytes_intranode"] == figures["forward"]["bytes_total"] > 0
    assert found["predicted_s"] == found["forward"]["predicted_s"] + found["backward"]["predicted_s"] > 0


def test_auto_says_what_it_chose_from_and_why(plan, capsys) -> None:
    batch = ["plan", "--lengths", "900,50,1200", "--topology", "4x1"]
    assert main([*batch, "--planner", "auto:candidates=sap|ring", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    choice = figures["choice"]
    assert list(choice) == ["ring", "sap"] and figures["planner"] == min(choice, key=choice.get)
    predicted_s = figures["forward"]["predicted_s"] + figures["backward"]["predicted_s"]
    assert predicted_s == choice[figures["planner"]]
    assert main([*batch, "--planner", "auto:candidates=sap|ring", "--rank", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("ms a layer predicted, forward and backward") == 2 and out.count(", chosen\n") == 1


def test_a_chart_of_both_directions(plan, capsys) -> None:
    path = plan("a.plan")
    capsys.readouterr()
    assert main(["simulate", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("planner sap, topology 4x1 on nodes-of-8: ") and out.count("\nr3 ") == 2
    assert "forward, mask 0:" in out and "backward, mask 0:" in out


def test_what_is_no_plan_or_cluster_is_refused(plan, tmp_path, capsys) -> None:
    listing = tmp_path / "listing.txt"
    listing.write_text("rank 0\ncreate $send-op $kv %1\nrank 1\ncreate $recv-op $kv %0\n")
    for arguments, told in (
        ([plan("a.plan"), "--cluster", "abacus"], "unknown preset 'abacus'; known ones are cpu-gloo, dgx-a100"),
        ([str(listing)], "a listing has no sizes"),
        ([str(tmp_path / "none")], "No such file"),
    ):
        assert main(["simulate", *arguments]) == 2
        assert told in capsys.readouterr().err
