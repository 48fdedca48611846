"""Which starts are restarts of a job that goes on with its own run, and from which checkpoint."""

import hashlib
import json
import os
import time

import pytest

from hsap.files import Written
from hsap.train import flags, restarts
from hsap.train.checkpoints.folder import LATEST, newest_good, publish, unfinished
from hsap.train.processes import Start, rank_environment, start_ranks, without_launcher

FIRST = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "r"}
AGAIN = FIRST | {"TORCHELASTIC_RESTART_COUNT": "2"}
QUEUED = {"SLURM_JOB_ID": "77"}
REQUEUED = QUEUED | {"SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        (FIRST, AGAIN, True),
        (FIRST, FIRST, False),
        (FIRST, AGAIN | {"TORCHELASTIC_RUN_ID": "other"}, False),
        (QUEUED, REQUEUED, True),
        (QUEUED, QUEUED, False),
        (QUEUED, REQUEUED | {"SLURM_JOB_ID": "78"}, False),
        ({}, {"SLURM_RESTART_COUNT": "1"}, False),
        (FIRST | QUEUED, FIRST | REQUEUED, True),
    ],
)
def test_only_a_restart_of_the_job_that_marked_a_folder_goes_on_there(tmp_path, monkeypatch, before, now, goes_on):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "outputs" / "run"
    out.mkdir(parents=True)
    assert not restarts.is_marked(out, now)
    restarts.mark(str(out), before)
    assert restarts.is_marked(out, now) == goes_on
    assert restarts.earlier_out(now) == ("outputs/run" if goes_on else None)
    (out / restarts.MARK).write_text("[not this")
    assert not restarts.is_marked(out, now)


def test_counts_that_are_no_numbers_are_none():
    assert not restarts.is_restart({"SLURM_RESTART_COUNT": "x", "TORCHELASTIC_RESTART_COUNT": ""})
    assert restarts.is_restart(AGAIN) and restarts.is_restart({flags.RESTARTS: "1"})


def save(home, step):
    folder = unfinished(home, step)
    folder.mkdir(parents=True)
    (folder / "rank0.safetensors").write_bytes(bytes([step]) * 100)
    state = {"step": step, "cursor": {"step": step}, "topology": "1x1", "identity": {}, "adam_steps": step}
    written = Written(100, hashlib.sha256(bytes([step]) * 100).hexdigest())
    publish(home, step, state, {"rank0.safetensors": written}, keep=9)


def test_the_newest_checkpoint_that_is_whole_is_gone_on_from(tmp_path, capsys):
    home = tmp_path / "checkpoints"
    assert newest_good(home) is None and not restarts.go_on(str(tmp_path))
    for step in (2, 4, 6):
        save(home, step)
    assert newest_good(home) == 6
    (home / "step6" / "rank0.safetensors").write_bytes(bytes(100))
    capsys.readouterr()
    assert restarts.go_on(str(tmp_path)) and (home / LATEST).read_text() == "step4"
    assert "from the checkpoint of step 4 (step6 is damaged)" in capsys.readouterr().err
    (home / LATEST).write_text("step2")  # what lies beyond was left behind on purpose
    assert newest_good(home) == 2


def test_a_restart_that_can_not_name_its_checkpoint_says_so(tmp_path):
    save(tmp_path / "checkpoints", 2)
    (tmp_path / "checkpoints" / f".{LATEST}").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"checkpoints/latest can't be written \(No space left"):
        restarts.go_on(str(tmp_path))


SCRIPT = """
import json, os, signal, sys, time
told = [os.environ["RANK"], os.environ["HSAP_RESTARTS"], os.environ["HSAP_OUT"], sys.argv[1:]]
path = f"{os.environ['HSAP_OUT']}.{told[0]}.{told[1]}"
with open(path + ".part", "w") as file:
    json.dump(told, file)
os.rename(path + ".part", path)
if told[:2] == ["1", "0"]:
    while not os.path.exists(f"{os.environ['HSAP_OUT']}.0.0"):  # rank 0 is ended with this one
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_that_hsap_starts_are_started_again_from_the_checkpoint(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "it's out"
    save(out / "checkpoints", 3)
    begin = time.monotonic()
    script = str(tmp_path / "script.py")
    assert start_ranks(Start("cpu", 2), script, ["a=1"], str(out), program="hsap check leak", restarts=1) == 0
    assert time.monotonic() - begin < 60
    told = json.loads((tmp_path / "it's out.0.1").read_text())
    assert told == ["0", "1", str(out), ["a=1", "resume=true", rf"out='{tmp_path}/it\'s out'"]]
    assert json.loads((tmp_path / "it's out.0.0").read_text())[3] == ["a=1"]
    said = capfd.readouterr().err
    assert "\nhsap check leak: rank 1 was ended by signal SIGKILL" in f"\n{said}" and "train.py" not in said
    assert "restart 1 of 1" in said and "of step 3" in said


def test_what_a_job_started_by_us_has_is_not_handed_down():
    above = {flags.POSITIONS: "/proc/1/fd/3", flags.RESTARTS: "2", "PATH": "/bin"}
    assert without_launcher(above) == {"PATH": "/bin"}
    assert flags.POSITIONS not in rank_environment(above, "cpu", "x")
