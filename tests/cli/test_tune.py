"""`hsap tune` at its door."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hsap.cli import main, tune

PROJECT = Path(__file__).resolve().parents[2]
SMALL = ["--cluster", "cpu-gloo", "--ranks-per-node", "2", "--seq-len", "256", "--global-batch-tokens", "512"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder of its own, where experiments may be written."""
    shutil.copytree(PROJECT / "configs", tmp_path / "configs")
    (tmp_path / "datasets").symlink_to(PROJECT / "datasets")
    monkeypatch.setattr(tune, "PROJECT", tmp_path)
    return tmp_path


def lengths(folder: Path, batches) -> str:
    path = folder / "lengths.json"
    path.write_text(json.dumps(batches), encoding="utf-8")
    return str(path)


def test_a_table_figures_and_an_experiment(project, capsys) -> None:
    data = lengths(project, [[100, 90], {"sequences": [[256], [7, 1, 120]]}])
    common = ["tune", "--model", "tiny", "--data", data, *SMALL, "--planners", "sap", "--top", "3"]
    assert main([*common, "-o", "mine"]) == 0
    out = capsys.readouterr().out
    path = project / "configs" / "experiment" / "mine.yaml"
    assert "tiny on 1 x cpu-gloo" in out and "tokens/s" in out and str(path) in out
    assert "By `hsap tune`: tiny on 1 x cpu-gloo" in path.read_text(encoding="utf-8")
    assert main([*common, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ranks"] == 2 and figures["packs_per_step"] == 2 and figures["rows"]
    assert figures["rows"][0]["tokens_per_s"] >= figures["rows"][-1]["tokens_per_s"] > 0
    assert all(row["next_planner"] is None for row in figures["rows"]), "there is just one planner"
    assert main([*common, "--planners", "sap,flashcp,sap", "--json"]) == 0
    found = {row["topology"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    two = {found["2x1"]["planner"], found["2x1"]["next_planner"]["planner"]}
    assert two == {"sap", "flashcp"} and found["2x1"]["next_planner"]["step_s"] > 0


def test_lengths_are_those_of_prepared_data(tmp_path, capsys) -> None:
    rows = [{"tokens": [2] * length} for length in (5, 90, 256)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, out = str(PROJECT / "datasets/demo/tokenizer.json"), str(tmp_path / "out")
    made = ["prepare", str(tmp_path / "d.jsonl"), "-o", out, "--workers", "1", "--tokenizer", tokenizer]
    assert main(made) == 0
    assert sorted(tune.read_lengths(out, 1000, 0)) == [5, 90, 256]
    assert sum(tune.read_lengths(out, 300, 1)) <= 300 and tune.read_lengths(out, 300, 1) == tune.read_lengths(
        out, 300, 1
    )
    assert sum(tune.read_lengths(out, 3, 1)) == 3
    with pytest.raises(ValueError, match=r"--data: .*holds no finished prepared data"):
        tune.read_lengths(str(tmp_path), 1000, 0)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_files_may_begin_with_a_mark_of_their_encoding(mark, project, capsys) -> None:
    data, cluster = project / "lengths.json", project / "own.yaml"
    data.write_bytes(mark + b"[100, 90]")
    cluster.write_bytes(mark + (PROJECT / "configs" / "cluster" / "cpu-gloo.yaml").read_bytes())
    asked = ["tune", "--model", "tiny", *SMALL, "--data", str(data), "--cluster", str(cluster), "--planners", "sap"]
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]


def test_a_cluster_may_be_a_file(project, capsys) -> None:
    file = project / "mine.yaml"
    file.write_text((PROJECT / "configs" / "cluster" / "dgx-a100.yaml").read_text().replace("42.3e+9", "80.0e+9"))
    file.write_text(file.read_text().replace("name: dgx-a100", "name: mine"), encoding="utf-8")
    asked = ["tune", "--model", "tiny", *SMALL, "--cluster", str(file), "--planners", "sap", "--top", "1"]
    assert main([*asked, "-o", "own"]) == 0
    assert "1 x mine (2 ranks of 74.5 GiB" in capsys.readouterr().out
    written = (project / "configs" / "experiment" / "own.yaml").read_text(encoding="utf-8")
    assert "capacity_bytes: 80000000000.0" in written and "override /cluster" not in written


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "nobody"], "--model: unknown name 'nobody'; known models are gpt-30b"),
        (["--cluster", "abacus"], "unknown preset 'abacus'"),
        (["--data", "nothing"], "neither a folder of hsap prepare, a file F.json nor the name of a dataset"),
        (["--data", "none.json"], "No such file"),
        (["--nodes", "0"], "--nodes is 0"),
        (["--planners", "auto"], "--planners: planners: unknown name 'auto'"),
        (["--planners", "sap,"], "unknown name ''"),
        (
            ["--global-batch-tokens", "9"],
            "--global-batch-tokens, --seq-len: global_batch_tokens=9: a step has",
        ),
        (["--measure", "--nodes", "2"], "--measure, --nodes: trials run on this machine alone"),
        (["--seed", "-1"], "--seed is -1"),
        (["--global-batch-tokens", "1000000000000"], "more than 1048576 packs"),
        (["--nodes", "100000000000"], "ranks are more than the 131072 that are searched"),
        (["train.steps=3"], "train.steps=3: settings of train.py are for --measure"),
        (["-o", "../x"], "an experiment's name is letters"),
        (["--seq-len", "16777216", "--global-batch-tokens", "16777216"], "nothing that is legal fits"),
    ],
)
def test_errors_are_one_paragraph(arguments, told, capsys) -> None:
    assert main(["tune", "--model", "tiny", *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_what_only_a_checkout_can_is_refused_elsewhere(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tune, "PROJECT", tmp_path / "site-packages")
    for more, missing in (
        (["--model", "llama2-7b", "-o", "mine"], "configs/experiment"),
        (["--model", "llama2-7b", "--measure"], "train.py"),
        (["--model", "tiny"], "datasets/demo/tokenizer.json"),
    ):
        assert main(["tune", *SMALL, *more]) == 2
        error = capsys.readouterr().err
        assert f"there is no {tmp_path / 'site-packages' / missing}" in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir()), "nothing is written into an installed package's folder"
    assert tune.read_model("llama2-7b").vocab_size == 32000  # models come with the package


def test_a_corpus_without_documents_is_refused(tmp_path, capsys) -> None:
    assert main(["tune", "--model", "tiny", *SMALL, "--data", lengths(tmp_path, [])]) == 2
    assert "there is no document in it" in capsys.readouterr().err


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from hsap.cli import main; main(sys.argv[1:]);"
        "print([m for m in ('torch', 'deepspeed', 'hydra') if m in sys.modules])"
    )
    asked = ["tune", "--model", "tiny", *SMALL, "--planners", "sap", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_experiment_trains_and_trials_are_measured(tmp_path, capsys) -> None:
    name = "tuned-by-a-test"
    path = PROJECT / "configs" / "experiment" / f"{name}.yaml"
    data = lengths(tmp_path, [[100, 90, 256, 7, 1, 120] * 3])
    asked = ["tune", "--model", "tiny", "--data", data, *SMALL, "--planners", "sap", "--top", "1", "--json"]
    try:
        assert main([*asked, "--measure", "-o", name]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert (row["measured_tokens_per_s"] or 0) > 0, row["trial_failed"]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
             "--nproc-per-node=2", str(PROJECT / "train.py"), f"+experiment={name}", "train.steps=2",
             "train.eval_every=0", "train.tensorboard=false", f"out={tmp_path / 'run'}"],
            capture_output=True, text=True, cwd=PROJECT, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    finally:
        path.unlink(missing_ok=True)
    steps = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(step)["step"] for step in steps] == [1, 2]
