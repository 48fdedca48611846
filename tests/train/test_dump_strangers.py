"""Dumps as a stranger may have made them: all checksums are right, and something doesn't fit."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from hsap.api import compile
from hsap.cli import main as hsap
from hsap.data.batch import MicroBatch
from hsap.files import sha256
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.problem import Problem, Topology
from hsap.ir.shared import shared_masks
from hsap.models import ModelConfig
from hsap.models.llama import Llama
from hsap.tensorfile import write_tensors
from hsap.train.checkpoints.folder import digest
from hsap.train.checkpoints.masters import WEIGHT
from hsap.train.checkpoints.tensors import key
from hsap.train.guard.dump import FORMAT, STATE, _write_group, read_dump
from hsap.train.guard.replay import Replayer, repeats
from tests.train.batches import micro_batch

MODEL = ModelConfig.from_mapping(
    {"vocab_size": 100, "num_layers": 2, "hidden_dim": 16, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8,
     "ffn_dim": 24, "masks": "window:3+causal"}
)  # fmt: skip
LENGTHS = ((9, 4), (13,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A dump of two micro-batches, whose loss and gradient norm are what a replay gives."""
    path = tmp_path_factory.mktemp("dump") / "step3"
    path.mkdir()
    micros = [batch(lengths) for lengths in LENGTHS]
    plans = [compile(problem(lengths), "ring") for lengths in LENGTHS]
    files = _write_group(path, 0, micros, plans)
    torch.manual_seed(0)
    weights = {key(WEIGHT, name, 0): p.detach().flatten() for name, p in Llama(MODEL).named_parameters()}
    files["rank0.safetensors"] = asdict(write_tensors(path / "rank0.safetensors", weights))
    told = [
        {"lengths": micro.lengths, "sequences": micro.sequences, "answers": [], "document_ids": micro.document_ids,
         "losses": [1.0] * len(micro.lengths), "targets": [1] * len(micro.lengths)}
        for micro in micros
    ]  # fmt: skip
    state = {"format": FORMAT, "step": 3, "seen": {"told": "step 3", "loss": 1.0, "grad_norm": 1.0},
             "model": json.loads(json.dumps(asdict(MODEL))), "dtype": "fp32",
             "num_targets": sum(micro.num_targets for micro in micros), "groups": [told], "config": {}, "versions": {},
             "files": files}  # fmt: skip
    save(path, state)
    replay = Replayer(read_dump(path)).replay(0)
    state["seen"] |= {"loss": replay.loss, "grad_norm": replay.grad_norm}
    save(path, state)
    return path


def batch(lengths) -> MicroBatch:
    return micro_batch(lengths)


def problem(lengths, masks=(("window:3", 1), ("causal", 1))) -> Problem:
    return Problem(Layout.from_lengths(lengths), HeadShape(2, 1, 8, "fp32"), Topology(2, 1), masks)


def save(path, state) -> None:
    """With the checksums of the files that are there."""
    for name in state["files"]:
        if (path / name).is_file():
            state["files"][name] = {"size": (path / name).stat().st_size, "sha256": sha256(path / name)}
    content = {name: value for name, value in state.items() if name != "sha256"}
    (path / STATE).write_text(json.dumps({**content, "sha256": digest(content)}))


@pytest.fixture
def altered(whole, tmp_path):
    """Makes a copy in which something is changed, checksums and all."""

    def make(change):
        path = tmp_path / "step3"
        path.mkdir()
        for file in whole.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        state = json.loads((path / STATE).read_text())
        change(path, state)
        save(path, state)
        return path

    return make


def test_a_whole_dump_is_seen_again_and_from_anywhere(altered, capsys, monkeypatch):
    path = altered(lambda path, state: None)
    monkeypatch.chdir(path)
    assert hsap(["replay", ".", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["repeats"] and told["replayed"]["loss"] == pytest.approx(told["seen"]["loss"])


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_loss_or_a_norm_that_is_not_seen_again_is_told(altered, capsys, name):
    path = altered(lambda path, state: state["seen"].update({name: state["seen"][name] * 1.5}))
    assert hsap(["replay", str(path)]) == 1
    assert "does NOT show" in capsys.readouterr().out


def test_norms_that_are_not_finite_are_seen_again_as_such(whole):
    dump, nan = read_dump(whole), math.nan
    replay = Replayer(dump).replay(0)
    assert repeats(dump, replay)
    assert not repeats(replace(dump, seen={**dump.seen, "grad_norm": nan}), replay)
    assert not repeats(dump, replace(replay, grad_norm=nan))


def _less(path, state):
    state["groups"][0].pop()


def _more(path, state):
    state["groups"].append(state["groups"][0])


def _unlisted(path, state):
    del state["files"]["group0-micro1.plan"]


def _planned(made):
    def change(path, state):
        (path / "group0-micro0.plan").write_bytes(compile(made, "ring").to_bytes())

    return change


def _of_model(**values):
    return lambda path, state: state["model"].update(values)


def _of_micro(**values):
    return lambda path, state: state["groups"][0][0].update(values)


def _of_seen(**values):
    return lambda path, state: state["seen"].update(values)


REFUSED = {
    "a micro-batch less": (_less, "num_targets is "),
    "a group more": (_more, "files lacks 'group1.safetensors'"),
    "a plan without checksum": (_unlisted, "files lacks 'group0-micro1.plan'"),
    "no group": (lambda path, state: state.update(groups=[]), "num_targets is "),
    "a group that is none": (lambda path, state: state.update(groups=[3]), "a group is 3"),
    "a plan of one mask": (_planned(problem(LENGTHS[0], ((Mask(), 2),))), "is for other masks than the model's"),
    "a plan of another window": (
        _planned(problem(LENGTHS[0], ((Mask.parse("window:4"), 1), (Mask(), 1)))), "is for other masks"),
    "a plan of other documents": (_planned(problem((4, 9))), "is for other documents or heads"),
    "a plan with answers": (_of_micro(answers=[[4, 6], []]), "is for other masks"),
    "answers that turn back": (_of_micro(answers=[[6, 4], []]), "has answers at"),
    "answers of nobody": (_of_micro(answers=[[6], [], []]), "answers of 3 documents"),
    "a vocabulary": (_of_model(vocab_size=10**30), "bytes of weights are no model of"),
    "layers": (_of_model(num_layers=10**30), "no model of"),
    "a width": (_of_model(ffn_dim=10**9), "no model of"),
    "a loss that is true": (_of_seen(loss=True), "seen.loss is True"),
    "a loss in words": (_of_seen(loss="much"), "seen.loss is 'much'"),
    "a norm of many digits": (_of_seen(grad_norm=10**400), "seen.grad_norm is 1"),
    "names as one": (_of_micro(document_ids="ab"), "document_ids is 'ab'"),
    "a document's loss": (_of_micro(losses=[1.0, None]), "a loss is None"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(what, altered, capsys):
    change, said = REFUSED[what]
    assert hsap(["replay", str(altered(change))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hsap replay: ") and said in line


def test_answers_to_one_question_have_their_masks(altered):
    answers = ((3, 6), ())
    shared = shared_masks(Mask(), LENGTHS[0], answers)

    def change(path, state):
        state["model"]["masks"] = "causal"
        _of_micro(answers=answers)(path, state)
        for number, masks in enumerate((shared, Mask())):
            plan = compile(problem(LENGTHS[number], ((masks, 2),)), "ring")
            (path / f"group0-micro{number}.plan").write_bytes(plan.to_bytes())

    assert read_dump(altered(change)).micros[0].batch.answers == answers
