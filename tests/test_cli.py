"""The command line: what it prints, what it refuses, and its exit codes."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hsap.api import compile
from hsap.cli import main, read_planner
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.text import parse
from hsap.planners import PLANNERS

SMALL = ["--heads", "4:2:8", "--planner", "ring"]
LISTING = "Rank 0\n0: create $send-op $kv %1\nRank 1\n0: compute\n"


class Report(SimpleNamespace):
    def __str__(self):
        return "; ".join(self.errors)


@pytest.fixture
def judged(monkeypatch):
    """Stand in for the verifier; what it was given is kept, and what it says can be set."""
    seen = SimpleNamespace(subjects=[], errors=[])

    def verify(subject):
        seen.subjects.append(subject)
        return Report(ok=not seen.errors, errors=seen.errors)

    monkeypatch.setattr("hsap.cli.verify", verify)
    return seen


def small_plan(lengths, topology="2x1", planner="ring"):
    problem = Problem(Layout.from_lengths(lengths), HeadShape(4, 2, 8, "bf16"), Topology.parse(topology))
    return compile(problem, planner)


def test_plan_prints_figures_grids_and_every_stream(judged, capsys):
    assert main(["plan", "--lengths", "5,6", "--topology", "2x1", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, 11 tokens, stages: 1" in out and "verified: yes" in out
    assert "tokens per rank: 5 6 (max/mean 1.091)" in out
    assert "area per rank:   15 21 (max/mean 1.167)" in out
    assert "home rank of each shard: 0 1\n" in out
    assert "q 0 | A1  ·\nq 1 |  · A1" in out
    assert out.count("stream rank 0") == out.count("stream rank 1") == 2
    assert "create $send-op $kv %1" in out
    assert "\x1b" not in out


def test_plan_shows_one_rank(judged, capsys):
    assert main(["plan", "--lengths", "5,6", "--topology", "2x1", "--rank", "1", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "stream rank 1" in out and "stream rank 0" not in out


def test_plan_json_has_the_agreed_keys_and_numbers(judged, capsys):
    assert main(["plan", "--lengths", "5,6", "--topology", "2x1", "--ranks-per-node", "1", "--json", *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.pop("plan_s") > 0
    assert figures.pop("instructions") == small_plan([5, 6]).num_instructions
    forward, backward = figures.pop("forward"), figures.pop("backward")
    assert figures == {
        "planner": "ring",
        "topology": "2x1",
        "ranks": 2,
        "tokens": 11,
        "area_per_rank": [15, 21],
        "tokens_per_rank": [5, 6],
        "area_imbalance": 21 / 18,
        "token_imbalance": 6 / 5.5,
        "stages": 1,
        "verified": True,
        "wire_dtype": "bf16",
    }
    # Ranks swap their KV: 2 · 2 heads · 8 · 2 bytes a row.
    assert forward["bytes_total"] == forward["bytes_internode"] == 11 * 64
    assert forward["max_recv_bytes_per_rank"] == 6 * 64
    assert forward["peak_buffer_bytes_per_rank"] >= 6 * 4 * 8 * 4  # at least the float32 accumulator
    assert set(backward) == set(forward)


def test_area_of_split_heads_adds_up_to_the_mask(judged, capsys):
    assert main(["plan", "--lengths", "9", "--topology", "1x3", "--heads", "4:4:8", "--planner", "ring", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["area_per_rank"] == [22.5, 11.25, 11.25]
    assert figures["forward"]["bytes_internode"] == 0


def test_nothing_to_do_has_no_imbalance(judged, capsys):
    assert main(["plan", "--lengths", "", "--json", *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["area_imbalance"] is None and figures["token_imbalance"] is None and figures["tokens"] == 0
    assert main(["plan", "--lengths", "", *SMALL]) == 0


def test_plan_keeps_its_planner_options_and_file(judged, capsys, tmp_path):
    stored, text = tmp_path / "a.plan", tmp_path / "a.txt"
    for path in (stored, text):
        assert main(["plan", "--lengths", "5,6", "--topology", "2x1", "-o", str(path), *SMALL]) == 0
    want = small_plan([5, 6])
    assert Plan.load(stored) == want and parse(text.read_text(encoding="utf-8")) == want
    capsys.readouterr()
    for path in (stored, text):
        assert main(["verify", str(path)]) == 0
        assert capsys.readouterr().out == "ok\n"
        assert judged.subjects[-1] == want


def test_an_invalid_plan_is_reported_with_exit_code_one(judged, capsys, tmp_path):
    judged.errors.append("rank 0, instruction 3: nobody receives this")
    path = tmp_path / "a.plan"
    small_plan([5, 6]).save(path)
    assert main(["verify", str(path)]) == 1
    assert "nobody receives this" in capsys.readouterr().out
    assert main(["plan", "--lengths", "5", "--json", *SMALL]) == 1
    out = capsys.readouterr()
    assert json.loads(out.out)["verified"] is False and "nobody receives this" in out.err
    kept = tmp_path / "b.plan"
    assert main(["plan", "--lengths", "5", "-o", str(kept), *SMALL]) == 1
    assert not kept.exists()


def test_a_file_of_batches_gives_a_list(judged, capsys, tmp_path):
    path = tmp_path / "batches.json"
    path.write_text('[[5, 6], {"sequences": [[3], [], [4, 1]]}, []]')
    assert main(["plan", "--lengths-file", str(path), "--json", *SMALL]) == 0
    assert [figures["tokens"] for figures in json.loads(capsys.readouterr().out)] == [11, 8, 0]
    assert judged.subjects[1].problem.layout == Layout((3, 4, 1), (1, 0, 2))
    path.write_text("[5, 6]")
    assert main(["plan", "--lengths-file", str(path), "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 11


def test_planners_are_listed(capsys):
    assert main(["planners", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == [*PLANNERS, "auto"]
    assert all(entry["paper"] and entry["summary"] for entry in listed)
    assert main(["planners"]) == 0
    assert all(name in capsys.readouterr().out.split() for name in ("ring",))


def test_options_of_a_planner():
    assert read_planner("sap") == ("sap", {})
    want = {"balance": "blocks", "n": 3, "x": 0.5, "on": True, "off": False, "limit": None}
    assert read_planner("sap:balance=blocks,n=3,x=0.5,on=true,off=false,limit=none") == ("sap", want)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "5,x"], "'x'"),
        (["--lengths", "5,0"], "lengths[1] is 0"),
        (["--lengths", "5," + "9" * 30], "lengths[1] is"),
        (["--lengths", "5", "--planner", "nobody"], "known planners are"),
        (["--lengths", "5", "--planner", "ring:speed=1"], "unknown option 'speed'"),
        (["--lengths", "5", "--planner", "ring:speed"], "can't read the option 'speed'"),
        (["--lengths", "5", "--planner", "sap:problem=1"], "unknown option 'problem'"),
        (["--lengths", "5", "--planner", "sap:planner=1"], "unknown option 'planner'"),
        (["--lengths", "5", "--planner", "sap:slack=1,slack=2"], "slack is given twice"),
        (["--lengths", "5", "--planner", "sap:slack=nan"], "slack is nan"),
        (["--lengths", "5", "--topology", "4"], "topology"),
        (["--lengths", "9223372036854775807"], "lengths[0] is 9223372036854775807"),
        (["--lengths", "16777216,1"], "16777217 tokens"),
        (["--lengths", "5", "--mask", "window:" + "9" * 30], "parameters of window[0]"),
        (["--lengths", "5", "--ranks-per-node", "9" * 30], "ranks_per_node"),
        (["--lengths", "5", "--max-tokens-per-rank", "0"], "max_tokens_per_rank"),
        (["--lengths", "5", "-o", ""], "--out"),
        (["--lengths", "5", "--topology", "1x16"], "query heads"),
        (["--lengths", "5", "--heads", "8:3:4"], "KV heads"),
        (["--lengths", "5", "--dtype", "int4"], "int4"),
        (["--lengths", "5", "--mask", "spiral"], "spiral"),
        (["--lengths", "5", "--rank", "4"], "--rank 4"),
        (["--lengths", "5", "--ranks-per-node", "0"], "--ranks-per-node"),
        (["--lengths", "50", "--max-tokens-per-rank", "12"], "max_tokens_per_rank=12"),
        (["--lengths-file", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_two(judged, capsys, arguments, words):
    assert main(["plan", *(["--planner", "ring"] if "--planner" not in arguments else []), *arguments]) == 2
    out = capsys.readouterr()
    assert words in out.err and out.err.count("\n") == 1 and out.out == ""


@pytest.mark.parametrize(
    "data", ["{", '{"a": 1}', '"x"', "[1.5]", "[true]", "[[1], 2]", '{"sequences": [1]}', "[" * 9999]
)
def test_a_bad_file_of_lengths_is_named(judged, capsys, tmp_path, data):
    path = tmp_path / "lengths.json"
    path.write_text(data)
    assert main(["plan", "--lengths-file", str(path), *SMALL]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"hsap-plan-1\n", b"hsap-plan-text 1\nplanner", b"hello"])
def test_a_bad_plan_is_named(judged, capsys, tmp_path, data):
    path = tmp_path / "a.plan"
    path.write_bytes(data)
    assert main(["verify", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_verify_reads_listings(judged, tmp_path):
    path = tmp_path / "listing.txt"
    path.write_text(LISTING)
    assert main(["verify", str(path)]) == 0
    assert judged.subjects == [parse(LISTING)]


def test_the_verifier_accepts_what_is_planned(capsys, tmp_path):
    path = tmp_path / "a.plan"
    assert main(["plan", "--lengths", "5,1,9", "--topology", "2x2", "-o", str(path), *SMALL]) == 0
    assert "verified: yes" in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LISTING + "1: create $recv-op $kv %0\n", "ok: transfers between the listed ranks agree (1); nothing else"),
        ("Rank 0\n0: create $send-op $kv %1\n", "ok: no transfer between the listed ranks, so there was nothing"),
    ],
)
def test_the_verifier_says_what_it_judged_of_a_listing(capsys, tmp_path, text, said):
    path = tmp_path / "listing.txt"
    path.write_text(text)
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_the_verifier_refuses_a_listing_without_partners(capsys, tmp_path):
    path = tmp_path / "listing.txt"
    path.write_text(LISTING)
    assert main(["verify", str(path)]) == 1
    assert "sends kv to rank 1, which never receives it" in capsys.readouterr().out


def test_the_command_line_starts_without_torch():
    code = "import sys; from hsap.cli import main; main(['planners']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


def test_a_closed_pipe_is_no_error():
    code = "import sys; from hsap.cli import main; sys.exit(main(['plan', '--lengths', '300', '--planner', 'zigzag']))"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert done.stderr.read() == b""
    done.stderr.close()
    done.wait()
