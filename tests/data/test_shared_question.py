"""Shared questions: labels, positions, packs, masks; and loss and gradients against a sequence for every answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsap
from hsap.data.batch import build_micro_batch, count_targets
from hsap.data.chat.shared_question import join
from hsap.data.document import Sample
from hsap.data.loader import StepLoader, eval_batches
from hsap.data.packing import POLICIES, Packing, PackStream, Piece, epoch_packs
from hsap.data.store import DocumentStore
from hsap.ir.mask import Mask, mask_slices
from hsap.ir.shared import SHAREABLE, check_shareable, shared_masks
from hsap.ir.slice import dense
from hsap.models import ModelConfig
from hsap.models.llama import build_model
from hsap.planning.compiling import PlanningSetup
from hsap.runtime.reference import reference
from hsap.targets import NO_TARGET
from tests.models.packed_oracle import visible_attention

chats = st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4))
"""Tokens of a question, and of each answer."""


def sample_of(name: str, question: int, answers: list[int], seed: int = 0):
    """A shared question of random tokens; with it (tokens, trained) of the question with each answer."""
    rng = np.random.default_rng([seed, question, *answers])
    tokens = [rng.integers(2, 60, n) for n in (question, *answers)]
    marks = [rng.random(n) < 0.7 for n in (question, *answers)]
    sample = join(name, tokens[0], tokens[1:], marks[0], marks[1:])
    alone = [(np.concatenate([tokens[0], a]), np.concatenate([marks[0], m])) for a, m in zip(tokens[1:], marks[1:])]
    return sample, alone


def targets_alone(question: int, alone) -> list[tuple]:
    """(number of the answer, position, token, target) of every target, the question's once."""
    seen = []
    for j, (tokens, trained) in enumerate(alone):
        for at in range(len(tokens) - 1):
            if trained[at + 1] and (j == 0 or at + 1 >= question):
                seen.append((j if at + 1 >= question else -1, at, int(tokens[at]), int(tokens[at + 1])))
    return sorted(seen)


def whole(store: DocumentStore) -> list[tuple[Piece, ...]]:
    return [tuple(Piece(i, 0, int(n)) for i, n in enumerate(store.lengths))]


@settings(max_examples=80, deadline=None)
@given(st.lists(chats, min_size=1, max_size=4))
def test_targets_and_positions_are_those_of_sequences_of_their_own(shapes):
    made = [sample_of(str(i), *shape, seed=i) for i, shape in enumerate(shapes)]
    store = DocumentStore.from_samples([sample for sample, _ in made])
    batch = build_micro_batch(store, whole(store), 1000)
    assert batch.num_targets == count_targets(store, whole(store)) == (batch.labels != NO_TARGET).sum()
    for i, ((question, _), (sample, alone)) in enumerate(zip(shapes, made)):
        rows = np.arange(store.starts[i], store.starts[i + 1])
        assert sample.answers == batch.answers[i] == store.answers_of(i)
        assert sample.answers[0] == question - 1
        seen = []
        for row, at in zip(rows, rows - rows[0]):
            answer = int(np.searchsorted(sample.answers, at, side="right")) - 1
            position = at if answer < 0 else question - 1 + at - sample.answers[answer]
            assert batch.positions[row] == position
            assert batch.tokens[row] == alone[max(answer, 0)][0][position]
            if batch.labels[row] != NO_TARGET:
                seen.append((answer, position, batch.tokens[row], batch.labels[row]))
        assert sorted(seen) == targets_alone(question, alone)


def test_a_shared_question_by_hand():
    sample = join(
        "q", np.array([5, 6, 7]), [np.array([8]), np.array([9, 3])], np.ones(3, bool), [np.ones(1), np.ones(2)]
    )
    assert sample.tokens.tolist() == [5, 6, 7, 8, 7, 9, 3]
    assert sample.answers == (2, 4)
    store = DocumentStore.from_samples([Sample("t", np.array([4, 4], np.int32)), replace(sample, trained=None)])
    assert store.trained is None and store.uncut.tolist() == [False, True]
    batch = build_micro_batch(store, whole(store), 9)
    assert batch.labels.tolist() == [4, -100, 6, 7, 8, -100, 9, 3, -100]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4]
    assert batch.answers == ((), (2, 4)) and batch.num_targets == 6


def test_columns_that_nobody_needs_are_none(make_store):
    store = make_store([3, 4])
    assert (store.trained, store.answers, store.uncut, store.answers_of(1)) == (None, None, None, ())
    mixed = DocumentStore.from_samples(
        [Sample("a", np.array([1, 2], np.int32)), Sample("b", np.array([3, 4], np.int32), np.array([True, False]))]
    )
    assert mixed.trained.tolist() == [True, True, True, False] and mixed.answers is None
    assert build_micro_batch(mixed, whole(mixed), 9).labels.tolist() == [2, -100, -100, -100]


def test_a_cut_document_keeps_its_trained_targets():
    marks = np.array([True, False, True, True, False, True])
    store = DocumentStore.from_samples([Sample("a", np.arange(6, dtype=np.int32), marks)])
    packs = [(Piece(0, 0, 2),), (Piece(0, 2, 5),), (Piece(0, 5, 6),)]
    labels = [build_micro_batch(store, [pack], 3).labels.tolist() for pack in packs]
    assert labels == [[-100, 2], [3, -100, 5], [-100]]
    assert [count_targets(store, [pack]) for pack in packs] == [1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=25), st.sampled_from(POLICIES))
def test_packs_never_cut_what_is_to_stay_whole(documents, policy):
    lengths = np.array([min(n, 20) if uncut else n for n, uncut in documents])
    uncut = np.array([uncut for _, uncut in documents])
    packs = epoch_packs(lengths, Packing(20, policy), 1, 0, 2, uncut)
    held = [piece for pack in packs for piece in pack]
    assert all(sum(piece.num_tokens for piece in pack) <= 20 for pack in packs)
    for document, length in enumerate(lengths):
        pieces = [piece for piece in held if piece.document == document]
        assert sum(piece.num_tokens for piece in pieces) == length
        assert len(pieces) == 1 or not uncut[document]


def test_one_longer_than_a_pack_is_dropped_where_it_is_packed():
    store = DocumentStore.from_samples([sample_of("q", 5, [9, 9])[0]])
    for make in (
        lambda: PackStream(store.lengths, Packing(16), 1, uncut=store.uncut),
        lambda: StepLoader(store, Packing(16), packs_per_step=1),
        lambda: eval_batches(store, Packing(16)),
    ):
        with pytest.raises(ValueError, match=r"every document is longer than data.pack_tokens=16 and dropped"):
            make()
    kept = Packing(16, long_documents="keep", max_document_tokens=24)
    assert eval_batches(store, kept).micro_batches[0].answers == (store.answers_of(0),)


def visible_alone(mask: Mask, question: int, answers: list[int]) -> np.ndarray:
    """Which row sees which, derived pair by pair from a document for each answer."""
    rows = [(-1, at) for at in range(question - 1)]
    rows += [(j, question - 1 + at) for j, n in enumerate(answers) for at in range(n + 1)]
    alone = [dense(mask.slices(question + n), question + n) for n in answers]
    seen = np.zeros((len(rows), len(rows)), int)
    for a, (j, q) in enumerate(rows):
        for b, (i, k) in enumerate(rows):
            if i in (-1, j):
                seen[a, b] = alone[max(j, 0)][q, k]
    return seen


MASKS = ["causal", "window:1", "window:4", "lambda:2,3", "lambda:0,5", "chunked:3", "chunked:7"]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(MASKS), chats, st.integers(0, 3))
def test_every_answer_sees_what_it_would_see_alone(text, shape, ordinary):
    mask, (question, answers) = Mask.parse(text), shape
    sample, _ = sample_of("q", *shape)
    lengths = [4] * ordinary + [len(sample.tokens)]
    masks = shared_masks(mask, lengths, [()] * ordinary + [sample.answers])
    assert masks[:-1] == (mask,) * ordinary
    layout = hsap.Layout.from_lengths(lengths)
    got = dense(mask_slices(layout, masks), layout.num_tokens)
    assert (got[4 * ordinary :, 4 * ordinary :] == visible_alone(mask, question, answers)).all()
    assert not got[4 * ordinary :, : 4 * ordinary].any()


def test_masks_without_a_meaning_are_refused():
    assert {mask.split(":")[0] for mask in MASKS} == set(SHAREABLE)
    for text in ("full", "prefix:3", "blockwise:4,2,1,1", "shared_question:2,20"):
        with pytest.raises(ValueError, match=f"mask {text}: what the answers to a shared question see"):
            check_shareable(Mask.parse(text))


class Planned(torch.autograd.Function):
    """Attention of one layer through a plan's reference."""

    @staticmethod
    def forward(ctx, q, k, v, plan, mask):
        ctx.plan, ctx.mask = plan, mask
        ctx.save_for_backward(q, k, v)
        return reference(plan, q, k, v, mask=mask)[0]

    @staticmethod
    def backward(ctx, grad_o):
        return *reference(ctx.plan, *ctx.saved_tensors, grad_o, mask=ctx.mask)[2:], None, None


CONFIG = ModelConfig.from_mapping(
    {
        "vocab_size": 64,
        "num_layers": 2,
        "hidden_dim": 24,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_dim": 20,
        "masks": "window:4+causal",
    },
    64,
)


def gradients(model, loss) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


@pytest.mark.parametrize(("planner", "topology"), [("sap", "3x1"), ("ring", "2x2"), ("dcp", "2x1")])
def test_loss_and_gradients_equal_sequences_of_their_own(planner, topology):
    """Float64, through the model: two layers of different masks, shared questions among ordinary documents."""
    shapes = [(7, [5, 1, 8]), (1, [4, 3]), (9, [2, 6])]
    made = [sample_of(str(i), *shape, seed=i) for i, shape in enumerate(shapes)]
    plain = Sample("plain", np.arange(3, 14, dtype=np.int32))
    store = DocumentStore.from_samples([made[0][0], plain, made[1][0], made[2][0]])
    batch = build_micro_batch(store, whole(store), 100)
    heads = hsap.HeadShape(4, 2, 6, "fp32")
    masks = tuple((mask, 1) for mask in CONFIG.layer_masks)
    problem = hsap.Problem(hsap.Layout.from_lengths([]), heads, hsap.Topology.parse(topology), masks)
    plan = PlanningSetup(problem, planner, {}, True).plan(batch)
    model = build_model(CONFIG, 3, torch.float64)

    def planned(q, k, v, layer):
        return Planned.apply(q, k, v, plan, layer)

    fields = (torch.from_numpy(field).long() for field in (batch.tokens, batch.positions, batch.labels))
    tokens, positions, labels = fields
    shared = model(tokens, positions, planned, labels)

    alone, num_targets = torch.zeros((), dtype=torch.float64), 0
    documents = [(0, plain.tokens, np.ones(len(plain.tokens), bool), 0)]
    for (question, _), (_, answers) in zip(shapes, made):
        documents += [(j, *answer, question) for j, answer in enumerate(answers)]
    for j, ids, trained, question in documents:
        targets = np.append(np.where(trained[1:], ids[1:], NO_TARGET), NO_TARGET)
        targets[: question - 1 if j else 0] = NO_TARGET  # counted with the first answer
        num_targets += (targets != NO_TARGET).sum()
        see = [torch.from_numpy(dense(mask.slices(len(ids)), len(ids)) > 0) for mask in CONFIG.layer_masks]
        rows = (torch.from_numpy(np.asarray(row)).long() for row in (ids, np.arange(len(ids)), targets))
        ids_T, positions_T, targets_T = rows
        alone = alone + model(
            ids_T, positions_T, lambda q, k, v, layer, see=see: visible_attention(q, k, v, see[layer]), targets_T
        )
    assert num_targets == batch.num_targets > 0
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=0)
    got, want = gradients(model, shared), gradients(model, alone)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-11, msg=name)
