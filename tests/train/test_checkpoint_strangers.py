"""Checkpoints that somebody has edited, renamed or made up: refused in one paragraph, and never another one taken."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from hsap.train.checkpoints import folder as module
from hsap.train.checkpoints.folder import STATE, check_identity, read_state, refuse_used
from hsap.train.checkpoints.tensors import Pieces
from tests.train.test_checkpoint_files import run_in, save, whole


@pytest.fixture
def home(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path / "run/checkpoints", step, keep=9)
    return tmp_path / "run/checkpoints"


@pytest.mark.parametrize(
    "tag", ["../../x", "../../other/checkpoints/step4", "/step4", "", "step04", "step4/.", "step4.bak", "step²", "\0"]
)
def test_latest_names_a_checkpoint_beside_it_or_nothing(home, tmp_path, tag):
    shutil.copytree(home.parent, tmp_path / "other")
    shutil.copytree(home / "step4", home / "step4.bak")
    (home / "latest").write_text(tag)
    with pytest.raises(ValueError, match=r"latest names .*which can't be used: .* newest good one is step6") as error:
        read_state(run_in(home.parent))
    assert str(error.value).isprintable()


def test_a_latest_that_is_no_text_is_refused(home):
    (home / "latest").write_bytes(b"\xff\xfe\x1b[2J\nstep4")
    for act in (read_state, refuse_used):
        with pytest.raises(ValueError, match=r"checkpoints") as error:
            act(run_in(home.parent))
        assert str(error.value).isprintable()


def test_checkpoints_that_have_changed_places_are_refused(home):
    for old, new in (("step4", "x"), ("step6", "step4"), ("x", "step6")):
        (home / old).rename(home / new)
    with pytest.raises(ValueError, match=r"step6/hsap.json is of step 4, whose checkpoint is named step4; rename it"):
        read_state(run_in(home.parent))


EDITS = {
    "step": ["4", -1, 4.0, True, None, 1 << 70],
    "adam_steps": ["4", -1, None, [4]],
    "cursor": [None, [], {}, {"step": 2}],
    "identity": [None, [["data.path", "x"]]],
    "files": [
        None,
        [],
        {"../step2/rank0.safetensors": {"size": 1, "sha256": "0"}},
        {"/etc/passwd": {"size": 1, "sha256": "0"}},
        {"rank0.safetensors": None},
        {"rank0.safetensors": {"size": 1}},
        {"rank0.safetensors": {"size": "1", "sha256": "0"}},
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDITS.items() for value in values])
def test_fields_that_no_run_has_written_are_refused(home, name, value):
    path = home / "step6" / STATE
    state = {**json.loads(path.read_text()), name: value}
    del state["sha256"]
    path.write_text(json.dumps({**state, "sha256": module.digest(state)}))
    with pytest.raises(ValueError, match=r"latest names step6, which can't be used: .*newest good one is step4"):
        read_state(run_in(home.parent))


def test_json_without_end_is_refused(home):
    (home / "step6" / STATE).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"hsap.json can't be read .*newest good one is step4"):
        read_state(run_in(home.parent))


def test_what_a_checkpoint_says_of_itself_is_printed_harmlessly(home):
    state = {"step": 6, "topology": "\x1b[2J", "identity": {"data.path": "a\x1b[31m\nb"}}
    with pytest.raises(ValueError, match=r"data.path was .*, now c") as error:
        check_identity(state, {"data.path": "c"})
    assert str(error.value).isprintable()


def test_folders_of_other_names_are_neither_counted_nor_dropped(home):
    for name in ("step²", "step007", "steps", "step3.bak"):
        (home / name).mkdir()
    save(home, 8, keep=2)
    assert whole(home) == 8
    assert sorted(path.name for path in home.iterdir()) == [
        *("latest", "step007", "step3.bak", "step6", "step8", "steps", "step²")
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("w", torch.zeros(3)),
        ("fp32:-1:w", torch.zeros(3)),
        ("fp32:x:w", torch.zeros(3)),
        ("fp32:0:w", torch.zeros(3, 1)),
        ("fp32:0:w", torch.tensor(1.0)),
        ("fp32:0:w", torch.zeros(3, dtype=torch.float64)),
        ("fp32:0:w", torch.zeros(3, dtype=torch.uint8)),
        ("random:0:cpu/0", torch.zeros(3)),
    ],
)
def test_tensors_that_are_no_pieces_are_refused(tmp_path, name, values):
    save_file({name: values}, tmp_path / "rank0.safetensors")
    with pytest.raises(ValueError, match=r"rank0.safetensors holds .*, which is no piece of a flattened parameter"):
        Pieces([tmp_path / "rank0.safetensors"])


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "rank0.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"rank0.safetensors isn't a safetensors file"):
        Pieces([tmp_path / "rank0.safetensors"])
