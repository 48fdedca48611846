"""`hsap view` at its door."""

import json

import pytest

from hsap.cli import main
from tests.view.plans import compiled, write_run


@pytest.fixture
def plan(tmp_path):
    def make(name: str, planner: str = "ring", lengths=(300, 20, 90)) -> str:
        compiled(lengths, "3x1", planner).save(tmp_path / name)
        return str(tmp_path / name)

    return make


def test_one_plan_and_its_trace(plan, tmp_path, capsys):
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    assert main(["view", plan("a.plan"), "-o", str(page), "--cluster", "dgx-h100", "--trace", str(trace)]) == 0
    assert "r.html: " in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>") and "simulated on dgx-h100" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_two_plans(plan, tmp_path):
    page = tmp_path / "r.html"
    assert main(["view", plan("a.plan"), plan("b.plan", "magi"), "-o", str(page)]) == 0
    assert "<title>ring and magi · HSAP</title>" in page.read_text()


def test_a_run_beside_its_plan(tmp_path):
    write_run(tmp_path, compiled([300, 20], "2x1"), step=7)
    page = tmp_path / "r.html"
    assert main(["view", str(tmp_path), "-o", str(page), "--step", "7"]) == 0
    assert "<title>planned and measured · HSAP</title>" in page.read_text()


def test_what_can_t_be_drawn_is_refused(plan, tmp_path, capsys):
    a, out = plan("a.plan"), ["-o", str(tmp_path / "r.html")]
    listing = tmp_path / "listing.txt"
    listing.write_text("rank 0\ncreate $send-op $kv %1\nrank 1\ncreate $recv-op $kv %0\n")
    for arguments, told in (
        ([a, plan("b.plan", "ring", (9, 9))], "different batches"),
        ([str(listing)], "a listing has no sizes to draw"),
        ([a, "--step", "3"], "--step: it chooses from what a run measured"),
        ([str(tmp_path), a], "is shown beside its own plan"),
        ([str(tmp_path)], "no timeline-rank"),
        ([a, "--cluster", "abacus"], "unknown preset"),
        ([str(tmp_path / "none")], "No such file"),
    ):
        assert main(["view", *arguments, *out]) == 2
        assert told in capsys.readouterr().err
    text = compiled([30, 20], "2x1", "ring").text()
    broken = tmp_path / "broken.txt"
    broken.write_text("\n".join(line for line in text.split("\n") if "recv-op" not in line))
    assert main(["view", str(broken), *out]) in (1, 2) and not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-o", "a.plan"], "that is PLAN, which would be overwritten"),
        (["-o", "same", "--trace", "same"], "that is -o, which would be overwritten"),
        (["-o", "no/r.html"], "its folder isn't there"),
        (["--trace", "no/t.json"], "its folder isn't there"),
        (["-o", ""], "-o: an empty name is no file"),
        ([""], "PLAN2: an empty name is no file"),
    ],
)
def test_no_file_is_lost_and_none_half_written(plan, tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    kept = (tmp_path / plan("a.plan")).read_bytes()
    assert main(["view", "a.plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.plan"] and (tmp_path / "a.plan").read_bytes() == kept
