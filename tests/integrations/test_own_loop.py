"""hsap.SequenceParallel in loops of one's own: beside one process, with tensor and pipeline parallelism, with FSDP2."""

import importlib.util
import json
import sys
from itertools import islice

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hsap
from tests.integrations import own_loop_ranks
from tests.integrations.torchrun import EXAMPLES, output_of
from tests.runtime.ranks import run_ranks


@pytest.fixture
def world(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(4, own_loop_ranks.everything)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2x2", "2x1", "tensor", "pipeline"])
def test_loss_and_gradients_are_those_of_one_process(four_ranks, way):
    loss, gradients = own_loop_ranks.expected()
    for told in four_ranks:
        got, got_gradients = told[way]
        torch.testing.assert_close(got, loss, rtol=1e-10, atol=0)
        for name, gradient in gradients.items():
            assert (got_gradients[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max(), name


@pytest.mark.slow
def test_ranks_that_disagree_are_told(four_ranks):
    told = [rank["disagreeing"] for rank in four_ranks]
    assert all("must load the same documents" in text and "\n" not in text for text in told)
    for case in ("same lengths", "same lengths later"):
        told = [rank[case] for rank in four_ranks]
        assert all("labels aren't those of rank" in text and "\n" not in text for text in told)


@pytest.mark.slow
def test_plans_that_all_have_are_forgotten(four_ranks):
    assert sum(rank["many plans"] for rank in four_ranks) == 70 - 64


@pytest.mark.slow
def test_groups_that_do_not_fit_are_refused_everywhere(four_ranks):
    for rank, told in enumerate(rank["odd groups"] for rank in four_ranks):
        assert "topology 4x1 has 4 ranks, the group that was given 2" in told[0]
        assert rank == 2 or "aren't whole SP groups" in told[1]


def test_a_shard_has_every_field_by_one_gather(world):
    sp = hsap.SequenceParallel("1x1", hsap.HeadShape(2, 1, 4, "fp32"), workers=1)
    lengths, labels = [3, 1, 4], torch.tensor([5, 6, 7, 8, -100, 1, -100, 2])
    sp.plan_ahead(lengths)
    shard = sp.load(lengths, labels)
    assert shard.num_tokens == 8 and shard.num_targets == 4
    by_position = shard.rows.argsort()
    assert shard.positions[by_position].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert shard.targets[by_position].tolist() == [6, 7, -100, -100, 1, -100, 2, -100]
    field = torch.arange(24).reshape(3, 8)
    assert torch.equal(shard.take(field, dim=1), field[:, shard.rows])
    unlabelled = sp.load(lengths)
    assert unlabelled.targets is None
    with pytest.raises(ValueError, match="without labels"):
        sp.loss_scale(unlabelled.num_targets)
    assert sp.loss_scale(4, accumulation=2).item() == 0.5 and sp.loss_scale(0).item() == 1
    sp.close()


def test_wrong_uses_are_refused_in_a_paragraph(world):
    heads = hsap.HeadShape(2, 1, 4, "fp32")
    sp = hsap.SequenceParallel("1x1", heads, masks=["causal", hsap.Mask.parse("window:3")])
    assert [str(sp.load([4]).mask_of(layer)) for layer in range(3)] == ["causal", "window:3", "causal"]
    fresh = hsap.SequenceParallel("1x1", heads)
    sp.plan_ahead([3, 4])
    refused = {
        "plan_ahead was given another": lambda: sp.load([4, 3]),
        "labels have shape": lambda: sp.load([3, 4], torch.zeros(6)),
        "labels are float32": lambda: fresh.load([2], [1.5, 2.5]),
        "labels are int64 from -1 to 3": lambda: fresh.load([2], [-1, 3]),
        "to 4294967301": lambda: fresh.load([2], [3, 2**32 + 5]),
        "a field has 6 tokens": lambda: fresh.load([7]).take(torch.zeros(6)),
        "layout: lengths": lambda: sp.load([3, 0]),
        "the job has 1": lambda: hsap.SequenceParallel("2x1", heads),
        "expected NxM": lambda: hsap.SequenceParallel("2", heads),
        "masks is an empty list": lambda: hsap.SequenceParallel("1x1", heads, []),
        "known planners are": lambda: hsap.SequenceParallel("1x1", heads, planner="best"),
        "unknown preset": lambda: hsap.SequenceParallel("1x1", heads, cluster="moon"),
    }
    for told, use in refused.items():
        with pytest.raises(ValueError, match=told) as error:
            use()
        assert "\n" not in str(error.value)
    # What was planned ahead is still the next to load.
    assert sp.load([3, 4]).num_tokens == sp.load([7]).num_tokens == 7


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(ValueError, match="init_process_group"):
        hsap.SequenceParallel("1x1", hsap.HeadShape(2, 1, 4, "fp32"))


def example():
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("own_loop_example", EXAMPLES / "own_loop.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


def by_torch(q, k, v, layer):
    """One document's attention by torch: a window of 64 keys in layer 0, causal in layer 1."""
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    visible = (distance >= 0) & (distance < (64 if layer == 0 else len(q)))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.slow
def test_the_example_with_fsdp2_trains_as_one_process_does():
    out = output_of(EXAMPLES / "own_loop.py", 4, "2x1")
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    module = example()
    torch.manual_seed(0)
    model = module.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    packs = module.packs(pack_tokens=512, longest=300)
    assert [one["step"] for one in told] == list(range(module.STEPS))
    for one in told:
        documents = [torch.tensor(ids) for pack in islice(packs, module.PACKS_PER_STEP) for ids in pack]
        total = 0.0
        for ids in documents:
            targets = F.pad(ids[1:], (0, 1), value=-100)
            total = total + model(ids, torch.arange(len(ids)), by_torch, targets)
        loss = total / sum(len(ids) - 1 for ids in documents)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(one["loss"] - loss.item()) <= 1e-5
        assert abs(one["grad_norm"] / norm.item() - 1) <= 1e-4
