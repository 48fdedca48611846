"""Trials: what is given to train.py, what is made of what it does, and that nothing of it is left."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hsap import clusters
from hsap.ir.check import Refused
from hsap.ir.problem import Topology
from hsap.models import ModelConfig
from hsap.tune.found import Row
from hsap.tune.job import Job
from hsap.tune.setting import Setting
from hsap.tune.trials import Measured, check_measurable, measure

MODEL = ModelConfig(2048, 2, 128, 8, 4, 16, 352)
PATIENCE_S = 60


def job(nodes: int = 1) -> Job:
    cluster = clusters.read("cpu-gloo", nodes).starting_at(0, 2)
    return Job("tiny", MODEL, cluster, (30, 64, 1), 64, 2, "fp32")


def row(dp: int = 1, topology: str = "2x1") -> Row:
    setting = Setting(dp, Topology.parse(topology), "sap", 1, "none", 1, 1, "fp32")
    return Row(setting, 1.0, 1.0, 1.0, 1.0, {"weights": 1.0}, 12.0)


def project(folder: Path, body: str) -> Path:
    """A folder whose train.py does something else."""
    head = """
import json, os, pathlib, sys, time
words = (word.split("=", 1) for word in sys.argv[1:])
given = {key.lstrip("+"): value.strip(chr(34)) for key, value in words}
"""
    (folder / "train.py").write_text(head + body, encoding="utf-8")
    return folder


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("hsap-trial-*")]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Trials write below a folder of the test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert left(folder) == []


def test_the_first_step_is_left_out_and_documents_are_the_job_s(tmp_path) -> None:
    body = """
documents = [json.loads(line) for line in open(given["data.path"])]
assert [len(document["tokens"]) for document in documents] == [30, 64, 1]
assert max(max(document["tokens"]) for document in documents) < 2048
assert (given["topology"], given["planner.name"], given["engine.device"]) == ("2x1", "sap", "cpu")
out = pathlib.Path(given["out"])
out.mkdir()
lines = [json.dumps({"step": i, "tokens_per_s": rate}) for i, rate in enumerate([1, 50, 70, 60])]
(out / "metrics.jsonl").write_text("\\n".join(lines))
"""
    assert measure(project(tmp_path, body), job(), row()) == Measured(60)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "print('noise\\ntrain.py: it is too much; take less\\nmore noise', file=sys.stderr); sys.exit(1)",
            "take less",
        ),
        ("raise RuntimeError('nobody expected this')", "RuntimeError: nobody expected this"),
        ("os._exit(3)", "without a word"),
        ("", "it wrote no metrics"),
        ("os.write(2, b'\\xff\\xfe broken'); sys.exit(1)", "broken"),
    ],
)
def test_failures_are_told_in_words(body, told, tmp_path) -> None:
    found = measure(project(tmp_path, body), job(), row())
    assert found.tokens_per_s is None and told in found.failed and "\n" not in found.failed


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting for it a while."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1][0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def pids(folder: Path, count: int) -> list[int]:
    """Processes that wrote down who they are, once they are so many."""
    end = time.monotonic() + PATIENCE_S
    while len(found := [int(path.name) for path in folder.glob("pids/*")]) < count:
        assert time.monotonic() < end, "not all processes started"
        time.sleep(0.05)
    return found


SLEEPS = "(pathlib.Path(__file__).parent / 'pids' / str(os.getpid())).touch(); time.sleep(600)"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_trial_that_takes_too_long_is_ended(tmp_path) -> None:
    (tmp_path / "pids").mkdir()
    found = measure(project(tmp_path, SLEEPS), job(), row(), limit_s=2)
    assert found == Measured(None, "took more than 2 s")
    assert all(gone(int(path.name)) for path in tmp_path.glob("pids/*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent has ended")
@pytest.mark.parametrize(("how", "dp"), [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGKILL, 2)])
def test_trials_end_with_who_asked_for_them(how, dp, tmp_path, temporary) -> None:
    """Several SP groups are started by torch's agent, whose ranks have sessions of their own."""
    (tmp_path / "pids").mkdir()
    project(tmp_path, SLEEPS)
    code = (
        # What a shell starts in the background ignores SIGINT, and so would this.
        "import sys, pathlib, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from tests.tune.test_trials import job, measure, row;"
        "measure(pathlib.Path(sys.argv[1]), job(), row(int(sys.argv[2]), '1x1'))"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(dp)], stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(temporary)}, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    try:
        trials = pids(tmp_path, dp)
        asking.send_signal(how)
        asking.wait(PATIENCE_S)
    finally:
        asking.kill()
        asking.wait()
    assert all(gone(pid) for pid in trials)
    if how == signal.SIGKILL:
        # Nobody is left to remove it.
        for path in temporary.glob("hsap-trial-*"):
            shutil.rmtree(path)


def test_several_nodes_are_refused() -> None:
    check_measurable(job())
    with pytest.raises(Refused, match="this machine alone, and the job is for 2 nodes; ask for one"):
        check_measurable(job(2))


def test_an_accelerator_s_trial_doesn_t_run_on_the_cpu(tmp_path) -> None:
    device = replace(job(), cluster=clusters.read("dgx-a100", 1).starting_at(0, 2), dtype="bf16")
    body = "print('train.py: asked for', given['engine.device'], file=sys.stderr); sys.exit(1)"
    assert measure(project(tmp_path, body), device, row()).failed == "train.py: asked for cuda"
