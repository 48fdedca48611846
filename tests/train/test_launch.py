"""Real processes: every launcher, ranks that fail, and sweeps, with a loop that only reports what it found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SCRIPT = str(HERE / "fake_train.py")
ARGUMENTS = [f"--config-dir={HERE / 'configs'}", "model=stand_in"]


def launch(tmp_path, *overrides, by=(sys.executable,), script=SCRIPT, **flags):
    # Without what a launcher around the tests may have left; PATH, because deepspeed looks its parts up there.
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    environment = {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", **flags}
    command = [*by, script, *ARGUMENTS, *overrides]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)


def found(done):
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return [json.loads(line) for line in lines]


def errors(done):
    """What train.py said itself, without what launchers say around it."""
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]


@pytest.mark.slow
def test_plain_python_trains_alone_without_a_launcher(tmp_path):
    done = launch(tmp_path)
    (report,) = found(done)
    assert (report["world_size"], report["device"], report["planner"]) == (1, "cpu", "sap")
    assert report["directories"][0].endswith("-1x1")
    assert done.stderr == ""


@pytest.mark.slow
def test_plain_python_starts_cpu_ranks_silently_in_one_directory(tmp_path):
    done = launch(tmp_path, "+topology=2x1", "planner=zigzag")
    (report,) = found(done)
    assert (report["world_size"], report["dp"], report["threads"], report["planner"]) == (2, 1, "1", "zigzag")
    (directory,) = report["directories"]
    assert directory.startswith("outputs/") and directory.endswith("-2x1")
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]
    assert [p.name for p in (tmp_path / directory).iterdir()] == ["metrics.jsonl"]
    assert done.stderr == ""


@pytest.mark.slow
def test_bare_deepspeed_starts_cpu_ranks(tmp_path):
    (report,) = found(launch(tmp_path, "topology=2x1", by=(str(BIN / "deepspeed"),)))
    assert report["world_size"] == 2
    assert len(report["directories"]) == 1


@pytest.mark.slow
def test_ranks_of_torchrun_make_two_sp_groups_and_agree_on_a_directory(tmp_path):
    (report,) = found(
        launch(tmp_path, "+topology=1x1", by=(str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone"))
    )
    assert (report["world_size"], report["dp"]) == (2, 2)
    assert len(report["directories"]) == 1


@pytest.mark.slow
def test_ranks_of_torchrun_that_do_not_fit_say_what_would_once(tmp_path):
    done = launch(tmp_path, "+topology=3x1", by=(str(BIN / "torchrun"), "--nproc-per-node=2", "--standalone"))
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert len(told) == 1
    assert told[0].startswith("train.py: WORLD_SIZE=2 doesn't fit topology=3x1")
    # torchrun's own report comes last and must hold the reason, not only an exit code.
    assert "WORLD_SIZE=2 doesn't fit" in done.stderr.split("Root Cause")[1]


@pytest.mark.slow
def test_bad_configuration_is_one_paragraph_and_starts_nothing(tmp_path):
    done = launch(tmp_path, "+topology=2x1", "train.step=3")
    assert done.returncode == 1
    (told,) = errors(done)
    assert "train.step: no such key" in told and "Did you mean train.steps?" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("plannr=sap", "plannr: no such key; known ones are arena_multiple, "),
        (
            "+experiment=nonsense",
            "Could not find 'experiment/nonsense' Available options in 'experiment': long-context sm",
        ),
    ],
)
def test_a_misspelt_key_or_experiment_is_refused_with_what_there_is(tmp_path, override, told):
    done = launch(tmp_path, override)
    assert done.returncode == 1
    (paragraph,) = errors(done)
    assert told in paragraph and ("Did you mean planner?" in paragraph or override != "plannr=sap")


@pytest.mark.slow
def test_an_unknown_model_lists_the_known_ones(tmp_path):
    done = launch(tmp_path, "model=no_such_model")
    assert done.returncode == 1
    (told,) = errors(done)
    assert "model/no_such_model" in told and "stand_in" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("message", 1, ["train.py: rank 1: topology=the fault asked for: expected NxM"]),
        ("exit", 7, []),
        ("kill", 137, ["train.py: rank 1 was ended by signal SIGKILL, which is what"]),
    ],
)
def test_one_failing_rank_is_heard_and_its_exit_code_is_the_parents(tmp_path, fault, code, told):
    done = launch(tmp_path, "+topology=2x1", f"planner.fault={fault}", "planner.fault_rank=1")
    assert done.returncode == code
    assert [line[: len(start)] for line, start in zip(errors(done), told, strict=True)] == told


@pytest.mark.slow
def test_a_bug_of_all_ranks_shows_its_traceback_once(tmp_path):
    done = launch(tmp_path, "+topology=2x1", "planner.fault=bug")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.rstrip().endswith("RuntimeError: a bug in the loop")


@pytest.mark.slow
def test_a_message_shows_its_traceback_when_asked(tmp_path):
    done = launch(tmp_path, "planner.fault=message", HSAP_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("amid", ["imports", "starting ranks"])
def test_an_interrupt_before_training_ends_soon_with_one_line(tmp_path, amid):
    command = [sys.executable, str(HERE.parents[1] / "train.py"), "+topology=2x1", "+experiment=smoke", "out=mine"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process, end = psutil.Process(run.pid), time.monotonic() + 300
    seen = {
        "imports": lambda: any("numpy" in file.path for file in process.memory_maps()),
        # Two seconds into their imports; the run itself begins after many more.
        "starting ranks": lambda: sum(child.cpu_times().user > 2 for child in process.children()) == 2,
    }
    while not seen[amid]() and run.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    ranks = process.children()
    run.send_signal(signal.SIGINT)
    out, told = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, "")
    # On a busy machine ranks may have come as far as to tell how they read the data.
    *before, last = told.splitlines()
    assert last == "train.py: interrupted" and all(line.startswith("hsap: data.path: ") for line in before), told
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


@pytest.mark.slow
def test_a_sweep_runs_all_jobs_and_ends_with_one_table(tmp_path):
    # As the first of two ranks of DeepSpeed's launcher: its jobs must not take themselves for that rank.
    above = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "CROSS_SIZE": "1"}
    done = launch(tmp_path, "out=mine", "--multirun", "+topology=2by1,2x1", **above)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines[-2:]]
    assert lines[-4].split()[0] == "topology"
    assert rows == [
        ["2by1", "sap", "-", "-", "-", "1"],
        ["2x1", "sap", "3.3333", "4.5000", "200", "0"],
    ]
    assert sorted(p.name for p in (tmp_path / "mine").glob("*-*")) == ["1-2x1"]


@pytest.mark.slow
def test_only_rank_0_runs_a_sweep(tmp_path):
    done = launch(tmp_path, "--multirun", "+topology=2x1,1x2", RANK="1", WORLD_SIZE="2", LOCAL_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    far = launch(tmp_path, "--multirun", "+topology=2x1,1x2", RANK="0", WORLD_SIZE="2", LOCAL_SIZE="1")
    assert far.returncode == 1
    assert "--multirun starts the ranks of its jobs on one machine" in errors(far)[0]


@pytest.mark.slow
def test_train_py_prints_its_configuration_from_any_directory(tmp_path):
    done = launch(tmp_path, "--cfg", "job", "+topology=3x2", script=str(HERE.parents[1] / "train.py"))
    assert done.returncode == 0, done.stderr
    assert "topology: 3x2" in done.stdout
    assert list(tmp_path.iterdir()) == []
