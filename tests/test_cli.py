"""The command line: what it prints, what it refuses, and its exit codes."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hsap import clusters
from hsap.api import compile, simulate
from hsap.cli import datasets, main
from hsap.cli.plan import read_planner
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import MASKS, Mask
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.reader import parse
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

    monkeypatch.setattr("hsap.cli.plan.verify", verify)
    monkeypatch.setattr("hsap.cli.verify.verify", verify)
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
        "choice": None,
    }
    want = simulate(judged.subjects[-1]).makespans_s[0]
    assert (forward["predicted_s"], backward["predicted_s"]) == want and min(want) > 0
    # Ranks swap their KV: 2 · 2 heads · 8 · 2 bytes a row.
    assert forward["bytes_total"] == forward["bytes_internode"] == forward["bytes_internode_once_per_node"] == 11 * 64
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
    figures = json.loads(out.out)
    assert figures["verified"] is False and "nobody receives this" in out.err
    assert figures["forward"]["predicted_s"] is None
    assert main(["plan", "--lengths", "5", *SMALL]) == 1
    assert "no time predicted" in capsys.readouterr().out
    kept = tmp_path / "b.plan"
    assert main(["plan", "--lengths", "5", "-o", str(kept), *SMALL]) == 1
    assert not kept.exists()


def test_a_file_of_batches_gives_a_list(judged, capsys, tmp_path):
    path = tmp_path / "batches.json"
    path.write_text('[[5, 6], {"sequences": [[3], [], [4, 1]]}, []]')
    assert main(["plan", "--lengths-file", str(path), "--json", *SMALL]) == 0
    assert [figures["tokens"] for figures in json.loads(capsys.readouterr().out)] == [11, 8, 0]
    assert judged.subjects[-2].problem.layout == Layout((3, 4, 1), (1, 0, 2))
    path.write_text("[5, 6]")
    assert main(["plan", "--lengths-file", str(path), "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 11


def test_auto_says_what_became_of_its_candidates(judged, capsys):
    flags = ["plan", "--lengths", "5,60", "--topology", "2x1", "--heads", "4:2:8", "--planner"]
    assert main([*flags, "auto:candidates=ring|sap", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["choice"]) == {"ring", "sap"}
    assert figures["choice"][figures["planner"]] == min(figures["choice"].values())
    assert figures["choice"][figures["planner"]] == pytest.approx(
        figures["forward"]["predicted_s"] + figures["backward"]["predicted_s"]
    )


def test_copies_lie_side_by_side(judged, capsys, tmp_path):
    path = tmp_path / "batch.json"
    path.write_text('{"sequences": [[3], [4, 1]]}')
    assert main(["plan", "--lengths-file", str(path), "--sequences", "2", "--json", *SMALL]) == 0
    assert judged.subjects[-1].problem.layout == Layout((3, 4, 1, 3, 4, 1), (1, 2, 1, 2))
    assert main(["plan", "--lengths", "5,6", "--sequences", "3", "--json", *SMALL]) == 0
    assert judged.subjects[-1].problem.layout == Layout((5, 6) * 3, (2,) * 3)


def test_clusters_are_chosen_by_name(judged, capsys):
    for more, want in (([], 8), (["--cluster", "cpu-gloo"], 1 << 20), (["--cluster", "dgx-a100"], 8)):
        assert main(["plan", "--lengths", "5", "--json", *more, *SMALL]) == 0
        assert judged.subjects[-1].problem.cluster.ranks_per_node == want
    assert main(["plan", "--lengths", "5", "--cluster", "dgx-a100", "--ranks-per-node", "2", "--json", *SMALL]) == 0
    assert judged.subjects[-1].problem.cluster == replace(clusters.read("dgx-a100"), ranks_per_node=2)


def test_figures_of_several_masks_are_means_over_layers(judged, capsys):
    flags = ["plan", "--lengths", "40", "--topology", "2x1", "--ranks-per-node", "1", "--json", *SMALL]
    assert main([*flags, "--mask", "window:3*5+causal"]) == 0
    figures = json.loads(capsys.readouterr().out)
    window, causal = figures["per_mask"]
    assert (window["mask"], window["layers"], causal["mask"], causal["layers"]) == ("window:3", 5, "causal", 1)
    assert (sum(window["area_per_rank"]), sum(causal["area_per_rank"])) == (3 * 40 - 3, 40 * 41 // 2)
    assert sum(figures["area_per_rank"]) == pytest.approx((5 * 117 + 820) / 6)
    for key in ("bytes_total", "bytes_internode", "bytes_internode_once_per_node", "max_recv_bytes_per_rank"):
        for direction in ("forward", "backward"):
            want = (5 * window[direction][key] + causal[direction][key]) / 6
            assert figures[direction][key] == pytest.approx(want)
    flags.remove("--json")
    assert main([*flags, "--rank", "0", "--mask", "window:3*5+causal"]) == 0
    out = capsys.readouterr().out
    assert "mask 0: window:3, layers: 5" in out and out.count("stream rank 0") == 4


@pytest.mark.parametrize(
    "mask", [name + ":" * bool(f.least) + ",".join("1" * len(f.least)) for name, f in MASKS.items()]
)
def test_every_mask_is_planned(judged, capsys, mask):
    assert main(["plan", "--lengths", "40,7", "--json", "--mask", f"{mask}*2", *SMALL]) == 0
    assert judged.subjects[-1].problem.masks == ((Mask.parse(mask), 2),)


@pytest.mark.parametrize("name", datasets.names())
def test_a_pack_drawn_from_a_dataset_is_full_and_repeatable(name):
    pack = datasets.draw(name, 50_000, 7)
    assert sum(pack) == 50_000 and min(pack) > 0
    assert pack == datasets.draw(name, 50_000, 7)
    longer = datasets.draw(name, 90_000, 7)
    assert longer[: len(pack) - 1] == pack[:-1] and sum(longer) == 90_000
    assert name in ("single", "longalign-10k") or pack != datasets.draw(name, 50_000, 8)


def test_drawn_lengths_have_the_shares_and_densities_of_their_bins():
    drawn = np.array(datasets.draw("prolong-ArXiv(SlimPajama)", 1 << 24, 1)[:-1])
    within = (drawn >= 8192) & (drawn < 16384)
    assert within.mean() == pytest.approx(0.337, abs=0.03)
    # Density ∝ x^-2: the lower half of the bin, to 12288, has (1 - 8192 / 12288) / (1 - 8192 / 16384) = 2 / 3 of it.
    assert (drawn[within] < 12288).mean() == pytest.approx(2 / 3, abs=0.04)
    within = (drawn >= 2048) & (drawn < 4096)  # density ∝ 1 / x: the median is the geometric mean
    assert (drawn[within] < 2048 * 2**0.5).mean() == pytest.approx(0.5, abs=0.08)
    assert drawn.min() >= 128 and drawn.max() < 65536


def test_shipped_lengths_are_those_of_their_manifest():
    manifest = json.loads((datasets.FOLDER / "manifest.json").read_text(encoding="utf-8"))
    assert sorted(manifest) == ["bins.csv", "samples.json"]
    for name, entry in manifest.items():
        assert hashlib.sha256((datasets.FOLDER / name).read_bytes()).hexdigest() == entry["sha256"]
    assert sorted(name for entry in manifest.values() for name in entry["datasets"]) == sorted(datasets.names())


def test_a_drawn_pack_is_planned(judged, capsys):
    assert main(["plan", "--dataset", "ultrachat", "--tokens", "3000", "--seed", "2", "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3000
    assert judged.subjects[-1].problem.layout.lengths == tuple(datasets.draw("ultrachat", 3000, 2))


def test_a_command_whose_output_is_closed_says_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["planners"]) == 0


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
        (["--lengths", "5,x"], "--lengths: 'x'"),
        (["--lengths", "9" * 5000], "--lengths: "),
        (["--lengths", "5,0"], "lengths[1] is 0"),
        (["--lengths", "5," + "9" * 30], "lengths[1] is"),
        (["--lengths", "5", "--planner", "nobody"], "known planners are"),
        (["--lengths", "5", "--planner", "ring:speed=1"], "unknown option 'speed'"),
        (["--lengths", "5", "--planner", "ring:speed"], "can't read the option 'speed'"),
        (["--lengths", "5", "--planner", "sap:problem=1"], "unknown option 'problem'"),
        (["--lengths", "5", "--planner", "sap:planner=1"], "unknown option 'planner'"),
        (["--lengths", "5", "--planner", "sap:slack=1,slack=2"], "slack is given twice"),
        (
            ["--lengths", "5", "--planner", "nested:token_slack=1e308"],
            "token_slack is 1e+308; it must be from 0 to 100",
        ),
        (["--lengths", "5", "--planner", "dcp:eps_intra=500"], "eps_intra is 500; it must be from 0 to 100"),
        (["--lengths", "5", "--planner", "sap:slack=nan"], "slack is nan"),
        (["--lengths", "5", "--topology", "4"], "--topology: "),
        (["--lengths", "9223372036854775807"], "lengths[0] is 9223372036854775807"),
        (["--lengths", "16777216,1"], "16777217 tokens"),
        (["--lengths", "5", "--mask", "window:" + "9" * 30], "parameters of window[0]"),
        (["--lengths", "5", "--ranks-per-node", "9" * 30], "ranks_per_node"),
        (["--lengths", "5", "--max-tokens-per-rank", "0"], "max_tokens_per_rank"),
        (["--lengths", "5", "-o", ""], "--out"),
        (["--lengths", "5", "--topology", "1x16"], "query heads"),
        (["--lengths", "5", "--heads", "8:3:4"], "--heads"),
        (["--lengths", "5", "--dtype", "int4"], "--dtype"),
        (["--lengths", "5", "--mask", "spiral"], "--mask: "),
        (["--lengths", "5", "--mask", "causal*"], "--mask: "),
        (["--lengths", "5", "--mask", "causal*0"], "--mask: "),
        (["--lengths", "5", "--mask", "causal+"], "--mask: "),
        (["--lengths", "5", "--cluster", "atari"], "--cluster: "),
        (["--lengths", "5", "--cluster", "atari"], "dgx-a100"),
        (["--lengths", "5", "--sequences", "0"], "--sequences"),
        (["--lengths", "5", "--sequences", "9" * 30], "--sequences"),
        (["--lengths", "5", "--tokens", "9"], "--tokens"),
        (["--lengths", "5", "--seed", "9"], "--seed"),
        (["--dataset", "ldc"], "--tokens"),
        (["--dataset", "ldc", "--tokens", "0"], "--tokens"),
        (["--dataset", "ldc", "--tokens", "9", "--seed", "-1"], "--seed"),
        (["--dataset", "nothing", "--tokens", "9"], "known datasets are"),
        (["--lengths", "5", "--rank", "4"], "--rank 4"),
        (["--lengths", "5", "--ranks-per-node", "0"], "--ranks-per-node"),
        (["--lengths", "50", "--max-tokens-per-rank", "12"], "max_tokens_per_rank=12"),
        (["--lengths-file", "/nowhere/at/all.json"], "--lengths-file /nowhere/at/all.json"),
        (["--lengths-file", "/nowhere/at\n" + "x" * 99], "No such file"),
        (["--lengths", "5", "--topology", "4x1\n"], "--topology"),
        (["--lengths", "5x" * 3000], "--lengths"),
        (["--lengths", "5", "--heads", "9" * 5000 + ":1:1"], "--heads"),
        (["--lengths", "5", "--heads", "32767:1:1", "--topology", "1x32768"], "from 1 to 4096"),
        (["--lengths", "5", "--heads", "3000:1:1", "--topology", "1x4000"], "legal degrees are 1 to 3000"),
        (["--lengths", "5", "--mask", "window:" + "9" * 5000], "--mask"),
        (["--lengths", "5", "--planner", "ring:" + "x" * 5000], "--planner"),
        (["--lengths", "5", "--planner", "ring:" + "x" * 5000 + "=1"], "unknown option"),
        (["--lengths", "5", "--planner", "sap:balance=" + "x" * 5000], "unknown balance"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_two(judged, capsys, arguments, words):
    assert main(["plan", *(["--planner", "ring"] if "--planner" not in arguments else []), *arguments]) == 2
    out = capsys.readouterr()
    assert words in out.err and out.err.count("\n") == 1 and out.out == "" and len(out.err) < 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--lengths", "5", "--seed", "x"], "--seed"),
        (["plan", "--lengths", "5", "--seed", "9\n" + "x" * 5000], "--seed"),
        (["plan", "--lengths", "5", "--dataset", "ldc"], "--dataset"),
        (["plan"], "--lengths-file"),
        ([], "COMMAND"),
    ],
)
def test_flags_that_do_not_parse_are_one_paragraph_too(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out = capsys.readouterr()
    assert stop.value.code == 2 and words in out.err and out.err.count("\n") == 1 and out.out == ""
    assert len(out.err) < 500


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


@pytest.mark.parametrize("command", ["plan --lengths 9", "bench calibrate", "bench paper", "planners", "verify x"])
def test_an_unknown_flag_names_the_help_of_its_command(command, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--nope"])
    assert left.value.code == 2
    words = [word for word in command.split() if word in ("plan", "bench", "calibrate", "paper", "planners", "verify")]
    prog = " ".join(["hsap", *words])
    assert capsys.readouterr().err == f"{prog}: unrecognized arguments: --nope; see {prog} --help\n"
