"""Shared questions through two ranks: loss and gradients of a run equal those with a sequence for every answer."""

import json

import pytest
import torch

from hsap.checks.difference import GRADIENT_BAR, LOSS_BAR
from tests.parity import Case, arguments, write_data
from tests.train.shared_question_rank import train
from tests.train.worlds import run_world


@pytest.mark.slow
def test_two_ranks_train_shared_questions_as_sequences_of_their_own(tmp_path):
    data, case = write_data(tmp_path), Case("2x1", micro_packs=1, masks="window:24+causal")
    more = ["data.pack_tokens=1024", "train.packs_per_step=1"]
    outs = [tmp_path / name for name in ("shared", "alone")]
    run_world(2, [[*arguments(case, data, out, 4), *more] for out in outs], tmp_path, train)
    metrics = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in outs]
    assert len(metrics[0]) == 4
    for shared, alone in zip(*metrics, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=LOSS_BAR)
        assert shared["target_tokens"] == alone["target_tokens"]
        assert shared["tokens"] < alone["tokens"]
    gradients = [torch.load(out / "gradients.pt") for out in outs]
    for name, want in gradients[1].items():
        assert float((gradients[0][name] - want).norm() / want.norm()) < GRADIENT_BAR, name
