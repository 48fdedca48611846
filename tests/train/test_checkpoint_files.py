"""What a checkpoint's files hold, what a crash leaves of them, and what is said of damaged ones."""

import itertools
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hsap import files
from hsap.files import Written
from hsap.tensorfile import write_tensors
from hsap.train.checkpoints import folder as module
from hsap.train.checkpoints.folder import STATE, clear_unfinished, damage, publish, read_state, unfinished
from hsap.train.checkpoints.tensors import Pieces, key


def test_files_are_safetensors_with_their_size_and_checksum(tmp_path):
    tensors = {"a": torch.arange(7.0), "b": torch.tensor([1, 255], dtype=torch.uint8), "c": torch.empty(0)}
    tensors["d"] = torch.arange(12.0).reshape(3, 4)[:, 1]  # not contiguous
    written = write_tensors(tmp_path / "x", tensors)
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
    assert written.size == (tmp_path / "x").stat().st_size
    done = os.popen(f"sha256sum {tmp_path / 'x'}").read().split()
    assert done[0] == written.sha256


@pytest.mark.parametrize("cuts", [[0, 13], [0, 1, 12, 13], [0, 5, 5, 9, 13]])
def test_any_part_is_read_from_pieces_cut_anywhere(tmp_path, cuts):
    whole, paths = torch.arange(13.0), []
    for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
        paths.append(tmp_path / str(rank))
        write_tensors(paths[-1], {key("fp32", "w:odd", first): whole[first:last]})
    pieces = Pieces(reversed(paths))
    for start in range(14):
        for end in range(start, 14):
            assert torch.equal(pieces.read("fp32", "w:odd", start, end - start), whole[start:end])
    assert torch.equal(pieces.whole("fp32", "w:odd"), whole) and pieces.whole("fp32", "v") is None


def test_what_no_file_holds_is_refused(tmp_path):
    write_tensors(tmp_path / "x", {key("fp32", "w", 0): torch.zeros(4), key("fp32", "w", 6): torch.zeros(4)})
    pieces = Pieces([tmp_path / "x"])
    for start, numel in ((0, 10), (3, 2), (9, 2)):
        with pytest.raises(ValueError, match="the checkpoint lacks fp32 of w from element "):
            pieces.read("fp32", "w", start, numel)


def run_in(out, steps=99):
    return SimpleNamespace(out=str(out), train=SimpleNamespace(steps=steps))


def save(home, step, keep=2):
    """A checkpoint of two ranks."""
    clear_unfinished(home)
    fresh = unfinished(home, step)
    fresh.mkdir(parents=True)
    written = {}
    for rank in range(2):
        name = f"rank{rank}.safetensors"
        written[name] = write_tensors(fresh / name, {key("fp32", "w", rank): torch.tensor([float(step + rank)])})
    state = {"step": step, "cursor": {"step": step}, "topology": "2x1", "identity": {}, "adam_steps": step}
    publish(home, step, state, written, keep)


class Crash(BaseException):
    pass


def crash_at(monkeypatch, call):
    """Raise instead of the so-many-th thing done to the disk; gives the list of what was done."""
    done = []

    def counted(function, name):
        def instead(*arguments, **options):
            if len(done) == call:
                raise Crash
            done.append(name)
            return function(*arguments, **options)

        return instead

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name), name))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree, "rmtree"))
    for place in (module, files):
        monkeypatch.setattr(place, "open", counted(open, "open"), raising=False)
    return done


def whole(home):
    """The step that `latest` names, after all of its files were compared with their checksums."""
    state = read_state(run_in(home.parent))
    checkpoint = home / f"step{state['step']}"
    assert damage(checkpoint, state, state["files"]) is None
    paths = [checkpoint / name for name in state["files"]]
    assert Pieces(paths).read("fp32", "w", 0, 2).tolist() == [state["step"], state["step"] + 1]
    assert state["cursor"] == {"step": state["step"]}
    return state["step"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_at_any_step_of_writing_leaves_the_newest_whole_checkpoint(tmp_path, keep):
    found = []
    for call in range(99):
        home = tmp_path / str(call) / "checkpoints"
        for step in (2, 4):
            save(home, step, keep)
        shutil.copytree(home / "step4", home / "step6")  # left by a run that was resumed from step 4
        with pytest.MonkeyPatch.context() as monkeypatch:
            done = crash_at(monkeypatch, call)
            try:
                save(home, 6, keep)
            except Crash:
                finished = False
            else:
                finished = True
        found.append(whole(home))
        step = found[-1] + 2
        save(home, step, keep)
        assert whole(home) == step
        left = sorted(path.name for path in home.iterdir())
        assert left == sorted(["latest", *(f"step{s}" for s in (step - 2, step)[-keep:])])
        if finished:
            break
    assert finished and {"open", "fsync", "rename", "replace", "rmtree"} <= set(done) and len(found) > 12
    assert found == sorted(found) and set(found) == {4, 6}


def test_the_first_checkpoint_counts_once_latest_names_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "checkpoints", 2)
    with pytest.raises(ValueError, match="has no checkpoint"):
        read_state(run_in(tmp_path))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = [
    (lambda path: path.unlink(), "rank1.safetensors is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "rank1.safetensors is damaged: it has "),
    (lambda path: path.with_name(STATE).unlink(), "hsap.json can't be read"),
    (lambda path: path.with_name(STATE).write_text("{"), "hsap.json can't be read"),
    (lambda path: path.with_name(STATE).write_text('{"step": 8}'), "it lacks cursor, topology, "),
    (
        lambda path: path.with_name(STATE).write_text(path.with_name(STATE).read_text().replace(": 8", ": 9", 1)),
        "hsap.json is damaged: it doesn't have the SHA-256 that it says",
    ),
]


@pytest.mark.parametrize("harm,told", DAMAGE)
def test_damage_is_refused_by_name_and_the_newest_good_one_is_named(tmp_path, harm, told):
    home = tmp_path / "checkpoints"
    for step in (2, 4, 6, 8):
        save(home, step, keep=9)
    flip(home / "step6" / "rank0.safetensors")
    harm(home / "step8" / "rank1.safetensors")
    with pytest.raises(ValueError) as error:
        read_state(run_in(tmp_path))
    assert told in str(error.value)
    assert f"the newest good one is step4: write step4 into {home / 'latest'}" in str(error.value)
    (home / "latest").write_text("step4\n")
    assert whole(home) == 4


def test_a_changed_bit_is_found_by_its_checksum(tmp_path):
    home = tmp_path / "checkpoints"
    save(home, 2)
    flip(home / "step2" / "rank1.safetensors")
    state = read_state(run_in(tmp_path))
    assert damage(home / "step2", state, ["rank0.safetensors"]) is None
    told = damage(home / "step2", state, state["files"])
    assert told.startswith(f"{home}/step2/rank1.safetensors is damaged: ")
    with pytest.raises(ValueError, match="there is no other good one"):
        raise module.refusal(home, "step2", told)


def test_a_checkpoint_whose_files_other_nodes_do_not_see_is_not_made(tmp_path):
    home = tmp_path / "checkpoints"
    save(home, 2)
    unfinished(home, 4).mkdir()
    written = {"rank1.safetensors": Written(10, "0")}
    with pytest.raises(FileNotFoundError, match="must lie where all nodes see the same files"):
        publish(home, 4, {}, written, 2)
    assert whole(home) == 2


def test_latest_is_plain_text_and_the_state_plain_json(tmp_path):
    home = tmp_path / "checkpoints"
    save(home, 2)
    assert (home / "latest").read_text() == "step2"
    state = json.loads((home / "step2" / STATE).read_text())
    assert sorted(state["files"]) == ["rank0.safetensors", "rank1.safetensors"]
