"""The folder that a run writes to: one that can't be, or that is full, is told in one paragraph."""

import json
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from hsap.train.checkpoints.saver import Saver
from hsap.train.groups import ProfileConfig
from hsap.train.inputs import check
from hsap.train.metrics import MetricsLog
from hsap.train.profile import Profile
from tests.train.test_inputs import configuration


@pytest.mark.parametrize("out", ["file", "file/deeper/out"])
def test_what_is_no_folder_is_refused_before_ranks_start(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=rf"out=.*: {tmp_path}/file is no folder that can be written to; set out="):
        check(configuration(tmp_path, f"out={tmp_path / out}"))
    check(configuration(tmp_path, f"out={tmp_path}/not/there/yet"))
    assert not (tmp_path / "not").exists()


def test_a_folder_that_can_not_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/metrics.jsonl can't be written \(File exists\)"):
        MetricsLog(tmp_path / "file", 9, 0, False, 1)


def test_a_full_disk_is_told_and_closing_does_not_hide_it(tmp_path):
    log = MetricsLog(tmp_path, 9, 0, False, 1)
    log.file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(ValueError, match=r"metrics.jsonl can't be written \(No space left on device\); make room"):
        log.write({"step": 1})
    log.close()


def test_lines_that_a_crash_has_left_are_cut_off(tmp_path):
    lines = [json.dumps({"step": step}).encode() for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], b"\xff\xfe\0", lines[2], b'{"st']))
    MetricsLog(tmp_path, 9, 2, False, 1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_profile_that_can_not_be_written_is_told(tmp_path):
    profile = Profile(ProfileConfig((1, 2), None), tmp_path, SimpleNamespace(recorder=None, rank=1), 0, 0, 0)
    profile.path.symlink_to("/dev/full")
    profile.session.recorder = SimpleNamespace(take=lambda: [None])
    profile._line = lambda step, record: {}
    with pytest.raises(ValueError, match=r"timeline-rank0.jsonl can't be written \(No space left on device\)"):
        profile.end(1, [])


def test_a_name_that_is_not_utf_8_is_one_that_a_checkpoint_can_be_told_by():
    saver = object.__new__(Saver)
    saver.config = SimpleNamespace(out="o\udcff")
    store = HashStore()
    store.set(saver._key(1, 0), "here")
    assert store.get(saver._key(1, 0)) == b"here"
