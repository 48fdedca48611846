"""Gradients reduced in several buckets, and a parameter that is larger than one, give one process's numbers."""

import pytest

from hsap.buckets import Buckets
from hsap.models import ModelConfig
from tests import parity
from tests.train.worlds import run_world

LARGE = {"model.vocab_size": 36_000, "model.hidden_dim": 128, "model.num_layers": 3, "model.ffn_dim": 2048,
         "model.tied_embeddings": "false"}  # fmt: skip
STEPS = 2
STAGES = (0, 2, 3)
"""1 reduces as 2 does."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, and two ranks under ZeRO's stages: the folders of their first gradients and metrics."""
    root = tmp_path_factory.mktemp("buckets")
    data = parity.write_data(root)
    cases = [parity.Case("1x1", zero_stage=0)] + [parity.Case("2x1", zero_stage=zero) for zero in STAGES]
    outs = [root / str(i) for i in range(len(cases))]
    for ranks in (1, 2):
        mine = [(case, out) for case, out in zip(cases, outs) if case.num_ranks == ranks]
        told = [f"{key}={value}" for key, value in LARGE.items()]
        listed = [
            [a for a in parity.arguments(case, data, out, STEPS) if a.split("=")[0] not in LARGE] + told
            for case, out in mine
        ]
        run_world(ranks, listed, root)
    return outs


def test_the_model_takes_several_buckets_and_one_parameter_is_larger() -> None:
    model = ModelConfig(36_000, 3, 128, 8, 2, 8, 2048)
    reduced = Buckets.of(model).reduced
    assert reduced < 36_000 * 128 and model.num_params > 2 * reduced


@pytest.mark.parametrize("zero", STAGES)
def test_buckets_change_nothing(runs, zero) -> None:
    difference = parity.compare(runs[0], runs[1 + STAGES.index(zero)])
    assert difference.ok, difference
