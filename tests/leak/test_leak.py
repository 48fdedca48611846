"""The leak check on good models, and on models broken one way each: it names the documents and the layer."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hsap
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, mask_slices
from hsap.ir.shared import shared_masks
from hsap.ir.slice import dense
from hsap.leak.changes import Batch, changed, choose
from hsap.leak.probe import probe
from hsap.leak.reach import backward_reach, forward_reach
from hsap.leak.report import Leak, LeakReport
from tests.leak.broken import VOCAB, Decoder

LENGTHS = (17, 1, 40, 23, 9)


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def check(model, given=None, **options):
    def forward(documents):
        return model(torch.cat(list(documents)), [len(one) for one in documents]), None

    return hsap.check_leak(model, given or documents(), forward, **options)


def test_a_good_model_passes_and_is_left_as_it_was():
    model = Decoder().train()
    model.layers[0].qkv.weight.grad = torch.ones_like(model.layers[0].qkv.weight)
    before, random = [p.clone() for p in model.parameters()], torch.random.get_rng_state()
    report = check(model)
    assert report.ok and "keep every bit" in str(report), str(report)
    report.check()
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(random, torch.random.get_rng_state())
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["layers.0.qkv.weight"]
    assert (model.layers[0].qkv.weight.grad == 1).all()
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_one_document_alone_shows_nothing_of_others_and_that_is_said():
    told = str(check(Decoder(), documents((40,))))
    assert "leak check: 1 document of 40 tokens" in told and "another order" not in told
    assert "can't show whether one document reaches another" in told
    assert "can't show" not in str(check(Decoder(), documents((40, 1))))


BROKEN = {
    "attention ignores documents": ("layers.1", "forward", {"3", "4"}),
    "mixes neighbours": ("layers.1", "forward", {"1", "3"}),
    "norms over the pack": ("layers.1", "forward", {"0", "1", "3", "4"}),
    "mixes gradients": ("layers.1", "backward", {"3"}),
    "attention looks ahead": ("layers.1", "forward", {"2"}),
    "mixes logits": ("the output", "forward", {"3"}),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_models_are_told_by_documents_and_layer(broken):
    where, direction, reached = BROKEN[broken]
    model = Decoder(broken)
    buffers = [buffer.clone() for buffer in model.buffers()]
    report = check(model)
    assert all(map(torch.equal, buffers, model.buffers()))
    # What the change of document 2, the longest one, does, or where it can't do anything, that of its second half.
    longest = [leak for leak in report.leaks if "document 2" in leak.told][:1]
    assert longest and all((leak.where, leak.direction) == (where, direction) for leak in longest), str(report)
    assert set().union(*(leak.documents for leak in longest)) == reached, str(report)
    with pytest.raises(ValueError, match=rf"leak check: .*document 2.* first in {where}") as error:
        report.check()
    assert "\n" not in str(error.value)


def test_a_report_is_read_as_strictly_as_a_file():
    leak = Leak("document a", "forward", "layers.1", "layers.1.mlp", ("b", "\ud800"), 9, math.inf, 0.0)
    for report in (LeakReport("nothing", ()), LeakReport("two documents", (leak, replace(leak, direction="backward")))):
        assert LeakReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    good = LeakReport("two documents", (leak,)).to_json()
    words = {"told": 3, "direction": "up", "where": None, "documents": ["b", 4]}
    numbers = {"num_documents": 1, "size": -1.0, "bound": True}
    bad = [{"leaks": [good["leaks"][0] | {name: value}]} for name, value in (words | numbers).items()]
    bad += [{"more": 1}, {"ok": True}, {"leaks": "x"}, {"leaks": [[]]}, {"told": 1}]
    for value in ([], "x", {"ok": True}, *(good | change for change in bad)):
        with pytest.raises(ValueError, match="leak"):
            LeakReport.from_json(value)


def test_positions_that_run_on_show_when_documents_move():
    (leak,) = check(Decoder("positions run on")).leaks
    assert leak.told == "another order of the documents" and leak.where == "places" and leak.direction == "forward"
    assert leak.num_documents >= 4 and leak.size > 0.1
    assert check(Decoder("positions run on"), moves=False).ok


def test_what_depends_on_the_others_lengths_shows_without_the_longest():
    (leak,) = check(Decoder("reckons with the pack's length")).leaks
    assert leak.told == "a batch without document 2" and leak.where == "layers.1" and leak.size > 0.1
    assert leak.num_documents == 4 and "2" not in leak.documents


def test_every_border_is_looked_at():
    # Documents 0 and 1 are neither the longest nor the shortest nor beside them.
    given = documents((16, 17, 5, 40, 4))
    assert check(Decoder(), given).ok
    leaks = check(Decoder("borders are rounded"), given, moves=False).leaks
    assert [leak.told for leak in leaks] == ["every second document"] and leaks[0].documents == ("1",)


@pytest.mark.parametrize("broken, what", [("keeps the last batch", "differ by"), ("isn't finite", "aren't finite")])
@pytest.mark.parametrize("moves", [False, True])
def test_what_can_t_be_told_does_not_pass(broken, what, moves):
    report = check(Decoder(broken), moves=moves)
    assert not report.ok and not report.to_json()["ok"] and what in report.undecided and what in str(report)
    with pytest.raises(ValueError, match=f"nothing can be told.*{what}"):
        report.check()


def test_dropout_without_a_module_is_told_and_is_no_leak():
    report = check(Decoder("drops without a module").train())
    assert report.ok and "model.eval()" in str(report), str(report)
    assert "model.eval()" not in str(check(Decoder("drops without a module").eval()))


def test_gradients_of_nothing_are_told():
    model = Decoder()

    def forward(documents):
        return (model(torch.cat(list(documents)), [len(one) for one in documents]) * 0).sum(), None

    report = hsap.check_leak(model, documents(), forward)
    assert report.ok and "gradients are all 0" in str(report)
    assert "gradients are all 0" not in str(check(model))


def test_a_forward_that_fails_leaves_the_model_as_it_was():
    model, runs = Decoder("norms over the pack").train(), []

    def forward(documents):
        runs.append(1)
        if len(runs) == 3:
            raise OSError("gone")
        return model(torch.cat(list(documents)), [len(one) for one in documents]), None

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(OSError, match="gone"):
        hsap.check_leak(model, documents(), forward)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_forwards_that_can_t_be_compared_are_refused():
    model = Decoder()

    def logits(documents):
        return model(torch.cat(list(documents)), [len(one) for one in documents])

    padded = torch.nn.utils.rnn.pad_sequence
    refused = {
        "two things": logits,
        "no_grad": lambda documents: (logits(documents).detach(), None),
        "one row of packed documents": lambda documents: (model.head(model.embedding(padded(list(documents)))), None),
        "use_reentrant=False": lambda documents: (
            checkpoint(model.head, model.embedding(torch.cat(list(documents))), use_reentrant=True), None),
    }  # fmt: skip
    for what, forward in refused.items():
        with pytest.raises(ValueError, match=rf"^leak check: .*{what}"):
            hsap.check_leak(model, documents(), forward)
    bad = {"bound": (math.nan, math.inf, -1, "1e-3", True), "masks": ([], 3, [None])}
    for option, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^leak check: {option} is"):
                check(model, **{option: value})
    with pytest.raises(ValueError, match="no documents were given"):
        hsap.check_leak(model, [], logits)


def test_layers_alone_can_be_watched_and_parameters_be_frozen():
    model = Decoder("mixes neighbours").requires_grad_(False)
    report = check(model, deep=False)
    assert not report.ok and {leak.module for leak in report.leaks if leak.direction == "forward"} == {"layers.1"}
    assert check(Decoder().requires_grad_(False)).ok


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (300, 1)])
def test_odd_batches(lengths):
    assert check(Decoder(), documents(lengths)).ok


def test_what_is_no_document_is_refused():
    for given in ([[]], [[[1, 2]]], [[0.5]], [{"text": "x"}], ["text"], [[[1], [1, 2]]]):
        with pytest.raises(ValueError, match="document 0"):
            check(Decoder(), given)
    with pytest.raises(ValueError, match="no module"):
        hsap.check_leak(Decoder(), documents(), lambda documents: (torch.zeros((), requires_grad=True), None))
    with pytest.raises(ValueError, match="neither a forward nor sp"):
        hsap.check_leak(Decoder(), documents())


def shared(seen_of):
    """Two shared questions in a pack; the model's attention sees what `seen_of` makes of the tables."""
    lengths, answers = (30, 12, 25), ((10, 17, 22), (), (8, 20))
    layout = Layout.from_lengths(lengths)
    table = mask_slices(layout, shared_masks(Mask(), lengths, answers))
    batch = Batch(np.concatenate([d.numpy() for d in documents(lengths)]), lengths, ("a", "b", "c"), (table,), (0,) * 3,
                  answers)  # fmt: skip
    model, seen = Decoder(), torch.from_numpy(seen_of(table, layout) > 0)

    def run(tokens, order):
        return model(torch.from_numpy(tokens), list(lengths), seen), np.arange(len(tokens))

    return probe(model, batch, run, moves=False)


def test_answers_to_one_question_are_kept_apart_by_their_mask():
    assert shared(lambda table, layout: dense(table, layout.num_tokens)).ok
    report = shared(lambda table, layout: dense(mask_slices(layout, Mask()), layout.num_tokens))
    # What an answer changes are the gradients of those before it, which it mustn't have looked at.
    told = {leak.told: leak for leak in report.leaks}
    assert set(told) == {"answer 3 of document a"}
    assert told["answer 3 of document a"].direction == "backward"
    assert told["answer 3 of document a"].documents == ("a",)


@pytest.mark.parametrize("seed", range(5))
def test_reach_is_that_of_dense_masks(seed):
    """Boolean matrices multiplied layer by layer."""
    draw = np.random.default_rng(seed)
    layout = Layout.from_lengths(draw.integers(1, 30, size=4).tolist())
    masks = [mask_slices(layout, Mask.parse(text)) for text in ("window:4", "causal", "lambda:2,3", "prefix:5")]
    layers = draw.integers(0, 4, size=5).tolist()
    changed = draw.random(layout.num_tokens) < 0.05
    seen = [dense(mask, layout.num_tokens) > 0 for mask in masks]
    reached, expected = forward_reach(changed, layers, masks), [changed]
    for index in layers:
        expected.append(expected[-1] | (seen[index] & expected[-1]).any(axis=1))
    assert all(map(np.array_equal, reached, expected))
    back = [reached[-1]]
    for index in layers[::-1]:
        back.append(back[-1] | (seen[index] & back[-1][:, None]).any(axis=0))
    assert all(map(np.array_equal, backward_reach(reached, layers, masks), back[::-1]))


def test_changes_are_few_and_of_every_token():
    batch = Batch(np.array([5, 5, 5, 9, 9, 2]), (3, 1, 2), ("a", "b", "c"), (), ())
    chosen = choose(batch)
    assert [c.spans for c in chosen] == [((0, 3),), ((3, 4),), ((0, 3), (4, 6)), ((1, 3),)]
    for change in chosen:
        assert np.array_equal(changed(batch, change) != batch.tokens, change.mark(6))
    same = Batch(np.zeros(4, dtype=int), (4,), ("a",), (), ())
    assert (changed(same, choose(same)[0]) == 1).all()
    none = choose(Batch(np.zeros(0, dtype=int), (), (), (), ()))
    assert len(none) == 4 and not any(c.spans for c in none)
