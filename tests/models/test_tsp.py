"""Weights and tokens sharded over the same ranks give one process's loss and gradients, in float64."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hsap.ir.summary import summary
from hsap.models.llama import Llama
from hsap.models.tsp.shards import WeightShards, head_shares
from hsap.models.tsp.traffic import weight_traffic
from hsap.models.tsp.vocabulary import Vocabulary
from tests.models.packed_oracle import layer_attention, random_pack
from tests.models.tsp_rank import Case, plans_of, run_cases
from tests.runtime.ranks import run_ranks

RAGGED = (19, 1, 40, 3)
NINE = {"num_q_heads": 9, "num_kv_heads": 3}
CASES = {
    "all ranks": Case("4x1", 4, (RAGGED,), model={"num_q_heads": 8, "num_kv_heads": 4}),
    "more ranks than KV heads": Case("4x1", 4, (RAGGED,), model={"num_q_heads": 8, "num_kv_heads": 2}),
    "one KV head": Case("4x1", 4, (RAGGED,), "ring", {"num_q_heads": 6, "num_kv_heads": 1}),
    "uneven, biases, norms, tied": Case(
        *("4x1", 4, (RAGGED,), "sap"),
        {**NINE, "attention_bias": "qkv", "qk_norm": True, "tied_embeddings": True},
    ),
    "projected again": Case("4x1", 4, (RAGGED,), "usp", {"checkpointing": "full", "num_kv_heads": 4, "qk_norm": True}),
    "intra": Case("2x2", 2, (RAGGED,), model={**NINE, "attention_bias": "all"}),
    "beside dp": Case("2x1", 2, (RAGGED, (30,)), model={**NINE, "masks": "window:7+causal"}),
    "ranks without rows": Case("4x1", 4, ((2,),)),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    """What every rank gave in each case."""
    by_rank = run_ranks(4, run_cases, list(CASES.values()))
    return {name: [ranks[i] for ranks in by_rank] for i, name in enumerate(CASES)}


def one_process(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the plain decoder over all packs."""
    model = Llama(replace(case.config, checkpointing="none"), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(case.weight(name, tuple(parameter.shape)))
    total = torch.zeros((), dtype=torch.float64)
    for dp_rank, pack in enumerate(case.packs):
        tokens, places, targets = random_pack(list(pack), case.config.vocab_size, seed=dp_rank)
        total = total + model(tokens, places, layer_attention(case.config, list(pack)), targets)
    total.backward()
    return total.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_one_process_s(results: dict[str, list[dict]], name: str) -> None:
    case, ranks = CASES[name], results[name]
    loss, gradients = one_process(case)
    torch.testing.assert_close(sum(rank["loss"] for rank in ranks), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(rank["per_token"] for rank in ranks), loss, rtol=1e-12, atol=0)
    shards = WeightShards(case.config, case.degree)
    for key, whole in gradients.items():
        for index in range(case.degree):
            part = shards.part(key, tuple(whole.shape), index)
            got = sum(rank["gradients"][key] for rank in ranks[index :: case.degree])
            assert got.shape == part.shape
            difference = (got - part.take(whole)).norm() / whole.norm()
            assert difference < 1e-12, (key, index, float(difference))


@pytest.mark.parametrize("name", CASES)
def test_copies_get_the_same_gradient_bit_for_bit(results: dict[str, list[dict]], name: str) -> None:
    case, ranks = CASES[name], results[name]
    shards = WeightShards(case.config, case.degree)
    for index in range(case.degree):
        for key, gradient in ranks[index]["gradients"].items():
            for holder in shards.part(key, tuple(gradient.shape), index).holders:
                assert torch.equal(gradient, ranks[holder]["gradients"][key]), (key, index, holder)


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_is_what_is_counted(results: dict[str, list[dict]], name: str) -> None:
    """By kind and rank for the weights; keys and values over all ranks, each layer's once for every shard."""
    case, ranks = CASES[name], results[name]
    for rank, result in enumerate(ranks):
        sent = dict(result["sent"])
        sent.pop("kv")
        assert +Counter(sent) == +weight_traffic(case.config, case.degree, rank % case.degree, 8, 8)
    kv = 0
    for pack in case.packs:
        plans, variant_of = plans_of(case, pack)
        for variant in variant_of:
            figures = summary(plans[variant])
            kv += case.config.num_layers * sum(figures[way]["bytes_total"] for way in ("forward", "backward"))
    assert sum(rank["sent"]["kv"] for rank in ranks) == kv


def test_heads_go_by_kv_head() -> None:
    assert [tuple(run) for run in head_shares(9, 3, 2)] == [(0, 6, 0, 2), (6, 3, 2, 1)]
    assert [tuple(run) for run in head_shares(9, 3, 4)] == [(0, 2, 0, 1), (2, 1, 0, 1), (3, 3, 1, 1), (6, 3, 2, 1)]
    assert [tuple(run) for run in head_shares(4, 1, 4)] == [(i, 1, 0, 1) for i in range(4)]
    with pytest.raises(ValueError, match="largest degree of this model is 9"):
        head_shares(9, 3, 10)


def test_what_the_sharded_decoder_can_t_do_is_refused() -> None:
    for name, value in (("mlp_chunk_tokens", 8), ("loss_chunk_vocab", 8), ("compile", True)):
        with pytest.raises(ValueError, match=rf"model\.{name}={value} isn't there under parallel=tsp"):
            WeightShards(Case("4x1", 4, (RAGGED,), model={name: value}).config, 4)


def test_a_shard_of_nothing_is_refused() -> None:
    config = Case("4x1", 4, (RAGGED,), model={"ffn_dim": 3}).config
    with pytest.raises(ValueError, match=r"model\.ffn_dim is 3"):
        WeightShards(config, 4)


def test_a_target_that_is_no_word_is_refused() -> None:
    vocabulary = Vocabulary(SimpleNamespace(index=0, degree=1), (0, 37), [((37, 8),)], 4)
    hidden, weight, targets = torch.randn(5, 8), torch.randn(37, 8), torch.tensor([1, 36, -100, 0, 9])
    assert vocabulary.losses(hidden, weight, targets)[0].isfinite()
    for wrong in (37, -1):
        targets[3] = wrong
        with pytest.raises(ValueError, match=f"target of row 3 is {wrong}: give a word of the vocabulary, 0 to 36"):
            vocabulary.losses(hidden, weight, targets)
