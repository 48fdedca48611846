"""Packing: no token lost or doubled, cuts only where they must be, determinism, dealing, resume."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.data.pack import POLICIES, PackStream, deal, epoch_packs, pack_area

lengths_strategy = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 80)), min_size=1, max_size=60).filter(any)


def tokens_of(packs):
    """Every token of packs as (document, place), one by one."""
    return [(piece.document, i) for pack in packs for piece in pack for i in range(piece.start, piece.stop)]


@settings(max_examples=60, deadline=None)
@given(
    lengths_strategy, st.integers(1, 40), st.sampled_from(POLICIES), st.integers(0, 3), st.sampled_from([1, 7, 1000])
)
def test_an_epoch_holds_every_token_once(lengths, pack_tokens, policy, epoch, window):
    packs = epoch_packs(np.array(lengths), pack_tokens, 5, epoch, policy, window)
    assert sorted(tokens_of(packs)) == [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    assert all(0 < sum(piece.num_tokens for piece in pack) <= pack_tokens for pack in packs)
    assert all(piece.num_tokens > 0 for pack in packs for piece in pack)


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 40))
def test_best_fit_cuts_only_what_is_longer_than_a_pack(lengths, pack_tokens):
    packs = epoch_packs(np.array(lengths), pack_tokens, 0, 0, "best_fit")
    pieces = sorted(piece for pack in packs for piece in pack)
    expected = []
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            expected.append((document, start, min(length, start + pack_tokens)))
            start += pack_tokens
    assert pieces == expected
    # Best fit's guarantee: no two packs could have been one.
    fills = sorted(sum(piece.num_tokens for piece in pack) for pack in packs)
    assert len(fills) < 2 or fills[0] + fills[1] > pack_tokens


@settings(max_examples=40, deadline=None)
@given(lengths_strategy, st.integers(1, 40))
def test_concat_fills_every_pack_but_the_last_and_keeps_documents_in_order(lengths, pack_tokens):
    packs = epoch_packs(np.array(lengths), pack_tokens, 0, 0, "concat")
    fills = [sum(piece.num_tokens for piece in pack) for pack in packs]
    assert fills[:-1] == [pack_tokens] * (len(fills) - 1)
    tokens = tokens_of(packs)
    assert all(b == (a[0], a[1] + 1) or b[1] == 0 for a, b in itertools.pairwise(tokens))


def long_tail(num_documents: int, seed: int) -> np.ndarray:
    """Document lengths as text corpora have them: median near 400, one in a thousand above 100,000."""
    random = np.random.default_rng(seed)
    return np.minimum(1 + random.pareto(0.9, num_documents) * 300, 400_000).astype(np.int64)


@pytest.mark.parametrize("pack_tokens", [8192, 32768])
def test_best_fit_fills_long_tailed_data(pack_tokens):
    lengths = long_tail(20_000, 1)
    packs = epoch_packs(lengths, pack_tokens, 0, 0)
    assert lengths.sum() / (len(packs) * pack_tokens) >= 0.99


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    lengths = long_tail(300, 2)
    for policy in POLICIES:
        first = epoch_packs(lengths, 4096, 1, 0, policy)
        assert first == epoch_packs(lengths, 4096, 1, 0, policy)
        assert first != epoch_packs(lengths, 4096, 2, 0, policy)
        assert first != epoch_packs(lengths, 4096, 1, 1, policy)


@settings(max_examples=30, deadline=None)
@given(lengths_strategy, st.integers(1, 40), st.integers(1, 9), st.sampled_from(POLICIES))
def test_the_stream_gives_the_epochs_one_after_the_other(lengths, pack_tokens, packs_per_step, policy):
    stream = PackStream(lengths, pack_tokens, packs_per_step, 3, policy)
    epochs = [epoch_packs(np.array(lengths), pack_tokens, 3, epoch, policy) for epoch in range(3)]
    owners = [epoch for epoch, packs in enumerate(epochs) for _ in packs]
    flat = [pack for packs in epochs for pack in packs]
    for number in range(len(flat) // packs_per_step):
        step = next(stream)
        first = number * packs_per_step
        assert (step.step, step.epoch) == (number + 1, owners[first])
        assert list(step.packs) == flat[first : first + packs_per_step]


@pytest.mark.parametrize("policy", POLICIES)
def test_resume_gives_the_steps_of_the_unbroken_run(policy):
    lengths = long_tail(50, 3) % 500 + 1
    arguments = (lengths, 256, 6, 11, policy)
    unbroken = PackStream(*arguments)
    steps, states = [], [unbroken.state_dict()]
    for _ in range(40):
        steps.append(next(unbroken))
        states.append(json.loads(json.dumps(unbroken.state_dict())))
    assert steps[-1].epoch >= 2
    for done in (0, 1, 7, 16, 39):
        by_state, by_seek = PackStream(*arguments), PackStream(*arguments)
        by_state.load_state_dict(states[done])
        by_seek.seek(done + 1)
        assert [next(by_state) for _ in steps[done:]] == steps[done:]
        assert [next(by_seek) for _ in steps[done:]] == steps[done:]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"pack_tokens": 16}, "pack_tokens was 8, now 16"),
        ({"packs_per_step": 4}, "packs_per_step was 2, now 4"),
        ({"policy": "concat"}, "policy was best_fit, now concat"),
        ({"lengths": [3, 5, 8]}, "lengths_crc32 was"),
        ({"lengths": [5, 3, 8, 1]}, "num_documents was 3, now 4"),
    ],
)
def test_a_cursor_of_another_run_is_refused_with_what_differs(change, named):
    settings_ = {"lengths": [5, 3, 8], "pack_tokens": 8, "packs_per_step": 2, "seed": 0}
    state = PackStream(**settings_).state_dict()
    with pytest.raises(ValueError, match=named):
        PackStream(**{**settings_, **change}).load_state_dict(state)


def test_a_cursor_that_is_none_is_refused():
    with pytest.raises(ValueError, match="lacks"):
        PackStream([4], 8, 2).load_state_dict({"step": 3})


@settings(max_examples=50, deadline=None)
@given(lengths_strategy, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_dealing_gives_every_pack_to_one_rank(lengths, dp_size, micro_packs, accumulation):
    step = next(PackStream(lengths, 30, dp_size * micro_packs * accumulation))
    hands = [deal(step.packs, rank, dp_size, micro_packs) for rank in range(dp_size)]
    assert all([len(batch) for batch in hand] == [micro_packs] * accumulation for hand in hands)
    assert sorted(pack for hand in hands for batch in hand for pack in batch) == sorted(step.packs)


def test_dealing_balances_attention_area():
    lengths = long_tail(4000, 4)
    stream = PackStream(lengths, 32768, 32)
    ratios = []
    for _ in range(12):
        packs = next(stream).packs
        areas = [sum(pack_area(p) for batch in deal(packs, rank, 4, 2) for p in batch) for rank in range(4)]
        ratios.append(max(areas) / np.mean(areas))
    unbalanced = PackStream(lengths, 32768, 32)
    contiguous = []
    for _ in range(12):
        packs = next(unbalanced).packs
        areas = [sum(map(pack_area, packs[rank * 8 : rank * 8 + 8])) for rank in range(4)]
        contiguous.append(max(areas) / np.mean(areas))
    assert np.mean(ratios) < 1.1 < np.mean(contiguous)


def test_a_count_that_does_not_divide_names_what_would():
    packs = [()] * 10
    with pytest.raises(ValueError, match=r"packs_per_step=10 .* multiple of 4, such as 8 or 12"):
        deal(packs, 0, 2, 2)
    with pytest.raises(ValueError, match=r"packs_per_step=3 .* multiple of 8, such as 8,"):
        deal(packs[:3], 0, 4, 2)
    with pytest.raises(ValueError, match=r"rank is 2"):
        deal(packs, 2, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pack_tokens": 0}, r"data\.pack_tokens is 0"),
        ({"packs_per_step": 0}, r"train\.packs_per_step is 0"),
        ({"seed": -1}, r"train\.seed is -1"),
        ({"window": 0}, r"data\.window is 0"),
        ({"policy": "random"}, r"packing: unknown policy 'random'; known ones are best_fit, concat"),
        ({"lengths": []}, "no token at all"),
        ({"lengths": [0, 0]}, "no token at all"),
    ],
)
def test_settings_out_of_range_are_refused(change, named):
    with pytest.raises(ValueError, match=named):
        PackStream(**{"lengths": [4], "pack_tokens": 8, "packs_per_step": 2, **change})
    with pytest.raises(ValueError, match="step is 0"):
        PackStream([4], 8, 2).seek(0)
