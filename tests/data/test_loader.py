"""The loader: the same steps for every data-parallel size and after a resume; failures that surface; no torch."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hsap.data.loader import StepLoader, eval_batches
from hsap.data.packing import POLICIES, Packing
from hsap.data.prefetch import Prefetch
from hsap.data.store import DocumentStore

LENGTHS = [1, 900, 3, 40, 77, 1, 12, 300, 8, 64, 5, 23, 130, 31, 2, 2, 1, 17]
SETTINGS = {"packing": Packing(64), "packs_per_step": 12, "seed": 4}


def take(store, number, **changes):
    with StepLoader(store, **{**SETTINGS, **changes}) as loader:
        return [next(loader) for _ in range(number)]


def figures(batch):
    return (
        batch.step,
        batch.epoch,
        batch.global_num_targets,
        batch.doc_ids_hash,
        batch.num_tokens,
        batch.padding_share,
        batch.cursor,
    )


def rows(batches):
    """(token, label, position) of all micro-batches, sorted."""
    return sorted(
        row
        for batch in batches
        for row in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.positions.tolist(), strict=True)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_is_the_same_for_every_data_parallel_size(make_store, policy):
    store = make_store(LENGTHS)
    whole = take(store, 5, packing=Packing(64, policy))
    for dp_size, micro_packs in ((1, 4), (2, 1), (2, 3), (3, 2), (6, 1), (12, 1)):
        common = {"packing": Packing(64, policy), "dp_size": dp_size, "micro_packs": micro_packs}
        ranks = [take(store, 5, dp_rank=rank, **common) for rank in range(dp_size)]
        for step, parts in enumerate(zip(*ranks, strict=True)):
            assert all(figures(part) == figures(whole[step]) for part in parts)
            assert all(len(part.micro_batches) == 12 // (dp_size * micro_packs) for part in parts)
            micro_batches = [batch for part in parts for batch in part.micro_batches]
            assert rows(micro_batches) == rows(whole[step].micro_batches)
            assert sum(batch.num_targets for batch in micro_batches) == whole[step].global_num_targets


def test_figures_of_a_step_agree_with_its_arrays(make_store):
    for step in take(make_store(LENGTHS), 6, micro_packs=3):
        labels = np.concatenate([batch.labels for batch in step.micro_batches])
        assert step.global_num_targets == (labels != -100).sum()
        assert step.num_tokens == len(labels)
        assert step.padding_share == pytest.approx(1 - len(labels) / (12 * 64))


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_lookahead_and_resume_change_nothing(make_store, lookahead):
    store = make_store(LENGTHS)
    unbroken = take(store, 9)
    for done in (0, 3, 8):
        resumed = [take(store, 9 - done, lookahead=lookahead, start_step=done + 1)]
        if done:
            cursor = unbroken[done - 1].cursor
            resumed.append(take(store, 9 - done, lookahead=lookahead, cursor=cursor, dp_size=3, dp_rank=1))
        for steps in resumed:
            assert [figures(step) for step in steps] == [figures(step) for step in unbroken[done:]]


def test_steps_without_any_target_are_given(make_store):
    (step,) = take(make_store([1, 1, 1]), 1, packs_per_step=2)
    assert (step.global_num_targets, step.num_tokens) == (0, 6)


def test_settings_that_do_not_fit_are_refused(make_store):
    store = make_store(LENGTHS)
    with pytest.raises(ValueError, match=r"train\.packs_per_step=12"):
        StepLoader(store, **SETTINGS, dp_size=5)
    with pytest.raises(ValueError, match=r"data\.lookahead=-1"):
        StepLoader(store, **SETTINGS, lookahead=-1)
    with pytest.raises(ValueError, match="rank is 3"):
        take(store, 1, dp_size=3, dp_rank=3)
    with pytest.raises(ValueError, match=r"data\.pack_tokens is 0"):
        eval_batches(store, Packing(0))
    with pytest.raises(ValueError, match="data-parallel size is 0"):
        eval_batches(store, Packing(8), dp_size=0)


@pytest.mark.parametrize("lengths", [LENGTHS, [1], [3, 3]])
@pytest.mark.parametrize(("dp_size", "micro_packs"), [(1, 1), (2, 2), (4, 1), (7, 3)])
def test_evaluation_covers_the_data_once_with_equal_forwards(make_store, lengths, dp_size, micro_packs):
    store = make_store(lengths)
    common = {"packing": Packing(64), "dp_size": dp_size, "micro_packs": micro_packs}
    ranks = [eval_batches(store, dp_rank=rank, **common) for rank in range(dp_size)]
    batches = [batch for rank in ranks for batch in rank.micro_batches]
    assert len({len(rank.micro_batches) for rank in ranks}) == 1
    assert all(len(batch.sequences) == micro_packs for batch in batches)
    assert [token for token, _, _ in rows(batches)] == list(range(sum(lengths)))
    alone = eval_batches(store, Packing(64))
    for rank in ranks:
        assert rank.doc_ids_hash == alone.doc_ids_hash
        assert rank.num_tokens == sum(lengths)
        assert rank.global_num_targets == sum(lengths) - len(lengths) == sum(batch.num_targets for batch in batches)
        assert rank.padding_share == pytest.approx(1 - sum(lengths) / (len(batches) * micro_packs * 64))


def test_evaluation_has_the_packs_of_the_longest_stage(make_store):
    store = make_store(LENGTHS)
    growing = Packing(16, "balanced", curriculum=((9, 64), (20, 32)))
    assert eval_batches(store, growing).doc_ids_hash == eval_batches(store, Packing(64)).doc_ids_hash


def test_steps_have_the_tokens_of_their_stage_and_long_packs_are_full(make_store):
    packing = Packing(16, long_documents="keep", max_document_tokens=900, curriculum=((3, 32),))
    steps = take(make_store(LENGTHS), 4, packing=packing)
    assert [step.pack_tokens for step in steps] == [16, 16, 32, 32]
    for step in steps:
        sizes = np.array([sum(batch.lengths) for batch in step.micro_batches])
        assert step.padding_share == pytest.approx(1 - sizes.sum() / np.maximum(sizes, step.pack_tokens).sum())
    assert max(sum(batch.lengths) for step in steps for batch in step.micro_batches) > 32


def test_what_may_not_be_cut_is_not(make_store):
    class Whole(DocumentStore):
        uncut = np.array(LENGTHS) < 41

    store = make_store(LENGTHS)
    store, uncut = Whole(store.tokens, store.starts, store.ids), Whole.uncut
    for step in take(store, 5, packing=Packing(40, "concat")):
        for batch in step.micro_batches:
            for name, length in zip(batch.document_ids, batch.lengths, strict=True):
                assert length == LENGTHS[int(name[3:])] or not uncut[int(name[3:])]
    Whole.uncut = np.ones(len(LENGTHS), bool)
    assert eval_batches(store, Packing(40)).num_tokens == sum(length for length in LENGTHS if length <= 40)


def failing(number):
    yield from range(number)
    raise RuntimeError("disk on fire")


@pytest.mark.parametrize("depth", [0, 1, 8])
def test_a_failure_comes_out_after_the_items_before_it(depth):
    with Prefetch(failing(3), depth) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(RuntimeError, match="disk on fire"):
            next(items)
        if depth:
            with pytest.raises(RuntimeError, match="disk on fire"):
                next(items)


@pytest.mark.parametrize("depth", [0, 1, 8])
def test_an_iterator_that_ends_ends(depth):
    with Prefetch(iter(range(5)), depth) as items:
        assert list(items) == [0, 1, 2, 3, 4]
        assert list(items) == []


def test_the_thread_works_ahead_by_the_depth_and_no_further():
    made = []

    def items():
        for number in range(100):
            made.append(number)
            yield number

    with Prefetch(items(), 3) as ahead:
        next(ahead)
        deadline = time.monotonic() + 5
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == 5  # one taken, three ready, one in hand waiting for room


def test_closing_ends_the_thread_while_it_waits_for_room():
    before = threading.active_count()
    items = Prefetch(iter(range(1000)), 2)
    assert next(items) == 0
    assert threading.active_count() == before + 1
    items.close()
    items.close()
    assert threading.active_count() == before
    assert list(items) == []


def test_a_forgotten_loader_does_not_keep_its_thread(make_store):
    before = threading.active_count()
    loader = StepLoader(make_store(LENGTHS), **SETTINGS)
    next(loader)
    del loader
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() == before


def test_data_needs_no_torch():
    code = "import sys, hsap.data.loader, hsap.data.tokenise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
