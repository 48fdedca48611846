"""Packing: no token lost or doubled, cuts only where they must be, balance, determinism, resume, curricula."""

import itertools
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.data.packing import POLICIES, Packing, PackStream, Pieces, count_long, deal, epoch_packs, pack_weight
from hsap.data.packing.windows import Place, Windows

lengths_strategy = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 80)), min_size=1, max_size=60).filter(any)


def tokens_of(packs):
    """Every token of packs as (document, place), one by one."""
    return [(piece.document, i) for pack in packs for piece in pack for i in range(piece.start, piece.stop)]


def every_token(lengths):
    return [(document, i) for document, length in enumerate(lengths) for i in range(length)]


def sizes(packs):
    return [sum(piece.num_tokens for piece in pack) for pack in packs]


@st.composite
def packings(draw, most_tokens=40):
    """Settings under which no token is dropped."""
    pack_tokens = draw(st.integers(1, most_tokens))
    kept = draw(st.sampled_from([None, 0, 30, 100]))
    return Packing(
        pack_tokens,
        draw(st.sampled_from(POLICIES)),
        draw(st.sampled_from([1, 7, 1000])),
        "cut" if kept is None else "keep",
        kept if kept is None else pack_tokens + kept,
        draw(st.sampled_from([1, 3, 50])),
    )


@settings(max_examples=100, deadline=None)
@given(lengths_strategy, packings(), st.integers(0, 3), st.integers(1, 5))
def test_an_epoch_holds_every_token_once(lengths, packing, epoch, packs_per_step):
    packs = epoch_packs(lengths, packing, 5, epoch, packs_per_step)
    assert sorted(tokens_of(packs)) == every_token(lengths)
    assert all(piece.num_tokens > 0 for pack in packs for piece in pack)
    kept = packing.max_document_tokens or packing.pack_tokens
    for pack, size in zip(packs, sizes(packs), strict=True):
        assert size <= packing.pack_tokens or (len(pack) == 1 and size == lengths[pack[0].document] <= kept)
        assert size or packing.policy == "balanced"
    # Whole steps; only as many packs are empty as a step has.
    if packing.policy == "balanced":
        assert len(packs) % packs_per_step == 0
        steps = [packs[i : i + packs_per_step] for i in range(0, len(packs), packs_per_step)]
        assert all(any(step) for step in steps) and (packs_per_step > 1 or all(packs))


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_documents_are_in_one_piece_and_those_beyond_the_limit_are_cut(policy):
    lengths = [31, 7, 8, 9, 1, 0, 3, 30, 12, 1000, 31]
    packing = Packing(8, policy, long_documents="keep", max_document_tokens=30)
    packs = epoch_packs(lengths, packing, 0, 0, 2)
    pieces = sorted(piece for pack in packs for piece in pack)
    for document in (3, 7, 8):
        assert [(0, lengths[document])] == [(start, stop) for d, start, stop in pieces if d == document]
    assert {len(pack) for pack in packs for piece in pack if piece.num_tokens > 8} == {1}
    assert sorted(tokens_of(packs)) == every_token(lengths)
    (counts,) = count_long(np.array(lengths), None, packing)
    assert (counts.empty, counts.cut, counts.kept, counts.dropped) == (1, 3, 3, 0)
    assert str(counts) == "longer than 8 tokens: 3 cut, 3 kept whole; 1 without any token left out"


@pytest.mark.parametrize("policy", POLICIES)
def test_dropped_documents_are_counted_and_nothing_else_is_missing(policy):
    lengths = [31, 7, 8, 9, 1, 0, 3]
    packing = Packing(8, policy, long_documents="drop")
    packs = epoch_packs(lengths, packing, 0, 0, 2)
    assert sorted(tokens_of(packs)) == every_token([0, 7, 8, 0, 1, 0, 3])
    (counts,) = count_long(np.array(lengths), None, packing)
    assert (counts.empty, counts.cut, counts.kept, counts.dropped, counts.dropped_tokens) == (1, 0, 0, 2, 40)
    assert str(counts) == "longer than 8 tokens: 2 dropped (40 tokens); 1 without any token left out"
    with pytest.raises(ValueError, match=r"every document is longer than data\.pack_tokens=8 and dropped; raise it"):
        PackStream([9, 0, 10], packing, 2)


@pytest.mark.parametrize(
    ("chats", "long_documents", "told"),
    [
        (None, "cut", ""),
        ([0, 1, 0, 1], "cut", "; 1 chat is cut: "),
        ([0, 1, 1, 0], "cut", "; 2 chats are cut: "),
        ([1, 1, 2, 0], "cut", "; up to 2 chats are cut: "),
        ([2, 0, 0, 2], "cut", ""),
        ([1, 1, 1, 1], "drop", ""),
        ([1, 1, 1, 1], "keep", "; 1 chat is cut: "),
    ],
)
def test_chats_that_are_cut_are_told(chats, long_documents, told):
    packing = Packing(8, long_documents=long_documents, max_document_tokens=30 if long_documents == "keep" else None)
    (counts,) = count_long(np.array([8, 31, 9, 3]), None, packing, None if chats is None else np.array(chats, np.int8))
    assert str(counts).partition("; ")[1] == told[:2] and told in str(counts)


@settings(max_examples=80, deadline=None)
@given(lengths_strategy, st.data(), st.sampled_from(POLICIES), st.sampled_from(["cut", "keep", "drop"]))
def test_what_may_not_be_cut_is_whole_or_dropped(lengths, data, policy, long_documents):
    uncut = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    limit = 50 if long_documents == "keep" else 20
    packing = Packing(20, policy, 7, long_documents, 50 if long_documents == "keep" else None)
    expected = [
        0 if (uncut[i] and length > limit) or (long_documents == "drop" and length > 20) else length
        for i, length in enumerate(lengths)
    ]
    if not any(expected):
        with pytest.raises(ValueError, match="and dropped"):
            epoch_packs(lengths, packing, 0, 0, 2, uncut)
        return
    packs = epoch_packs(lengths, packing, 0, 0, 2, uncut)
    assert sorted(tokens_of(packs)) == every_token(expected)
    assert all(piece.start == 0 and piece.stop == lengths[piece.document]
               for pack in packs for piece in pack if uncut[piece.document])  # fmt: skip
    (counts,) = count_long(np.array(lengths), uncut, packing)
    assert counts.dropped_tokens == sum(lengths) - sum(expected)


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 40))
def test_best_fit_cuts_only_what_is_longer_than_a_pack(lengths, pack_tokens):
    packs = epoch_packs(lengths, Packing(pack_tokens), 0, 0)
    for document, length in enumerate(lengths):
        pieces = [piece for pack in packs for piece in pack if piece.document == document]
        assert len(pieces) <= 1 or length > pack_tokens
    # Best fit's guarantee: no two packs could have been one.
    fills = sorted(sizes(packs))
    assert len(fills) < 2 or fills[0] + fills[1] > pack_tokens


@settings(max_examples=40, deadline=None)
@given(lengths_strategy, st.integers(1, 40), st.sampled_from([1, 5, 1000]))
def test_concat_fills_every_pack_but_the_last_and_keeps_documents_in_order(lengths, pack_tokens, window):
    packs = epoch_packs(lengths, Packing(pack_tokens, "concat", window), 0, 0)
    assert sizes(packs)[:-1] == [pack_tokens] * (len(packs) - 1)
    tokens = tokens_of(packs)
    assert all(b == (a[0], a[1] + 1) or b[1] == 0 for a, b in itertools.pairwise(tokens))
    assert packs == epoch_packs(lengths, Packing(pack_tokens, "concat"), 0, 0)


def long_tail(num_documents: int, seed: int) -> np.ndarray:
    """Document lengths as text corpora have them: median near 400, one in a thousand above 100,000."""
    random = np.random.default_rng(seed)
    return np.minimum(1 + random.pareto(0.9, num_documents) * 300, 400_000).astype(np.int64)


@pytest.mark.parametrize("pack_tokens", [8192, 32768])
def test_best_fit_fills_long_tailed_data(pack_tokens):
    lengths = long_tail(20_000, 1)
    packs = epoch_packs(lengths, Packing(pack_tokens), 0, 0)
    assert lengths.sum() / (len(packs) * pack_tokens) >= 0.999


@pytest.mark.parametrize("packs_per_step", [8, 24])
@pytest.mark.parametrize("pack_tokens", [8192, 32768])
def test_balanced_evens_out_the_area_of_a_step(pack_tokens, packs_per_step):
    lengths = long_tail(40_000, 1)
    packs = epoch_packs(lengths, Packing(pack_tokens, "balanced"), 0, 0, packs_per_step)
    ratios = []
    for first in range(0, len(packs), packs_per_step):
        step = packs[first : first + packs_per_step]
        weights = [sum(pack_weight(pack) for batch in deal(step, rank, 8) for pack in batch) for rank in range(8)]
        ratios.append(max(weights) / np.mean(weights))
    assert np.mean(ratios) < 1.03
    assert lengths.sum() / (len(packs) * pack_tokens) > 0.9


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_balanced_moves_no_document_further_than_allowed(lengths, pack_tokens, packs_per_step, max_delay_steps):
    """A window holds documents that follow each other in the random order, and makes no more steps than allowed."""
    lengths = np.array(lengths)
    order = np.random.default_rng([9, 0]).permutation(np.flatnonzero(lengths))
    packing = Packing(pack_tokens, "balanced", max_delay_steps=max_delay_steps)
    windows, place = Windows(lengths, None, packing, packs_per_step, 9), Place()
    while place.epoch == 0:
        window = windows.at(place)
        documents = order[place.first : window.first]
        assert set(window.packs.pieces.document.tolist()) == set(documents.tolist())
        # One document alone may be longer than all the steps are.
        assert len(window.packs) <= max_delay_steps * packs_per_step or len(documents) == 1
        place = windows.following(place, window)
    assert window.first == len(order)


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    lengths = long_tail(300, 2)
    for policy in POLICIES:
        packing = Packing(4096, policy)
        first = epoch_packs(lengths, packing, 1, 0)
        assert first == epoch_packs(lengths, packing, 1, 0)
        assert first != epoch_packs(lengths, packing, 2, 0)
        assert first != epoch_packs(lengths, packing, 1, 1)


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, packings(), st.integers(1, 9))
def test_the_stream_gives_the_epochs_one_after_the_other(lengths, packing, packs_per_step):
    stream = PackStream(lengths, packing, packs_per_step, 3)
    epochs = [epoch_packs(lengths, packing, 3, epoch, packs_per_step) for epoch in range(3)]
    owners = [epoch for epoch, packs in enumerate(epochs) for _ in packs]
    flat = [pack for packs in epochs for pack in packs]
    for number in range(len(flat) // packs_per_step):
        step = next(stream)
        first = number * packs_per_step
        assert (step.step, step.epoch) == (number + 1, owners[first])
        assert list(step.packs) == flat[first : first + packs_per_step]


@settings(max_examples=25, deadline=None)
@given(lengths_strategy, packings(), st.integers(1, 6), st.data())
def test_resume_at_every_step_and_seek_give_the_unbroken_run(lengths, packing, packs_per_step, data):
    curriculum = sorted(data.draw(st.sets(st.integers(2, 12), max_size=3)))
    limit = packing.max_document_tokens or 60
    stages = tuple((step, data.draw(st.integers(1, limit))) for step in curriculum)
    arguments = (lengths, replace(packing, curriculum=stages), packs_per_step, 11)
    unbroken = PackStream(*arguments)
    steps, states = [], [unbroken.state_dict()]
    for _ in range(14):
        steps.append(next(unbroken))
        states.append(json.loads(json.dumps(unbroken.state_dict())))
    for done in range(len(steps)):
        by_state, by_seek = PackStream(*arguments), PackStream(*arguments)
        by_state.load_state_dict(states[done])
        by_seek.seek(done + 1)
        assert by_state.state_dict() == by_seek.state_dict() == states[done]
        assert [next(by_state) for _ in steps[done : done + 3]] == steps[done : done + 3]
        assert next(by_seek) == steps[done]


@settings(max_examples=80, deadline=None)
@given(lengths_strategy, packings(), st.integers(1, 4), st.data())
def test_packs_grow_and_shrink_at_their_steps_and_no_token_is_lost(lengths, packing, packs_per_step, data):
    firsts = sorted(data.draw(st.sets(st.integers(2, 9), min_size=1, max_size=4)))
    limit = packing.max_document_tokens or 60
    curriculum = tuple((first, data.draw(st.integers(1, limit))) for first in firsts)
    packing = replace(packing, curriculum=curriculum)
    stream = PackStream(lengths, packing, packs_per_step, 2)
    seen, pieces = [], []
    while len(seen) < 2 * sum(lengths) or stream.state_dict()["step"] < 10:
        step = next(stream)
        expected = [tokens for first, tokens in packing.stages if first <= step.step][-1]
        assert step.pack_tokens == expected <= packing.max_pack_tokens
        for pack, size in zip(step.packs, sizes(step.packs), strict=True):
            assert size <= expected or (len(pack) == 1 and size <= packing.max_document_tokens)
        seen += tokens_of(step.packs)
        pieces += [piece for pack in step.packs for piece in pack]
    whole = len(seen) // sum(lengths) * sum(lengths)
    for first in range(0, whole, sum(lengths)):
        assert sorted(seen[first : first + sum(lengths)]) == every_token(lengths)
    if packing.long_documents == "cut" and packing.policy != "concat":
        shortest = min(tokens for _, tokens in packing.stages)
        assert all(p.stop - p.start == lengths[p.document] for p in pieces if lengths[p.document] <= shortest)


def test_a_cursor_stays_small_and_names_no_document():
    lengths = long_tail(5000, 3)
    packing = Packing(4096, "balanced", max_delay_steps=16, curriculum=((20, 8192), (40, 2048)))
    stream, sizes_ = PackStream(lengths, packing, 8, 1), []
    for _ in range(160):
        next(stream)
        sizes_.append(len(json.dumps(stream.state_dict())))
    assert max(sizes_) < 600
    # What a stage left is named no longer than it takes to give it.
    assert stream.state_dict()["place"][-1] == []


@pytest.mark.parametrize("policy", ["best_fit", "concat"])
def test_an_epoch_may_have_as_many_stages_as_it_likes(policy):
    """Packs that change their length each step leave something of every stage."""
    packing = Packing(2, policy, curriculum=tuple((2 + i, 2 + (i + 1) % 2) for i in range(600)))
    stream, seen = PackStream([1] * 1600, packing, 1), []
    for _ in range(605):
        seen += tokens_of(next(stream).packs)
    assert len(seen) == len(set(seen)) and len(stream.state_dict()["place"][-1]) == 600
    state = json.loads(json.dumps(stream.state_dict()))
    again = PackStream([1] * 1600, packing, 1)
    again.load_state_dict(state)
    assert next(again) == next(stream) and again.state_dict() == stream.state_dict()


def test_merged_pieces_are_the_longest_there_can_be():
    pieces = Pieces(*np.array([[3, 1, 3, 2, 3, 1], [5, 0, 0, 4, 9, 9], [9, 4, 5, 6, 10, 12]]))
    merged = pieces.merged()
    assert list(zip(merged.document.tolist(), merged.start.tolist(), merged.stop.tolist())) == [
        (3, 0, 10),
        (1, 0, 4),
        (2, 4, 6),
        (1, 9, 12),
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"packing": Packing(16)}, "pack_tokens was 8, now 16"),
        ({"packing": Packing(8, "concat")}, "policy was best_fit, now concat"),
        ({"packing": Packing(8, max_delay_steps=3)}, "max_delay_steps was 128, now 3"),
        ({"packing": Packing(8, long_documents="drop")}, "long_documents was cut, now drop"),
        ({"packing": Packing(8, curriculum=((5, 16),))}, r"curriculum was \[\], now \[\[5, 16\]\]"),
        ({"packs_per_step": 4}, "packs_per_step was 2, now 4"),
        ({"lengths": [3, 5, 8]}, "lengths_crc32 was"),
        ({"uncut": [True, False, False]}, "lengths_crc32 was"),
        ({"lengths": [5, 3, 8, 1]}, "num_documents was 3, now 4"),
    ],
)
def test_a_cursor_of_another_run_is_refused_with_what_differs(change, named):
    settings_ = {"lengths": [5, 3, 8], "packing": Packing(8), "packs_per_step": 2, "seed": 0}
    state = PackStream(**settings_).state_dict()
    with pytest.raises(ValueError, match=named):
        PackStream(**{**settings_, **change}).load_state_dict(state)


def test_a_cursor_that_is_none_is_refused():
    stream = PackStream([4], Packing(8), 2)
    for place in ([0, 0, 0, 0, 0, None], [0, 0, 0, 0, 0, [0, 0, 0, 0, 1, None]], [0], {}, None, [0, 0, 0, 0, "0", []]):
        state = stream.state_dict() | {"place": place}
        del state["crc32"]
        crc32 = zlib.crc32(json.dumps(state, sort_keys=True).encode())
        with pytest.raises(ValueError, match=r"the data cursor's place .* of another version"):
            stream.load_state_dict(state | {"crc32": crc32})
    with pytest.raises(ValueError, match="lacks"):
        PackStream([4], Packing(8), 2).load_state_dict({"step": 3})


@settings(max_examples=50, deadline=None)
@given(lengths_strategy, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from(POLICIES))
def test_dealing_gives_every_pack_to_one_rank(lengths, dp_size, micro_packs, accumulation, policy):
    step = next(PackStream(lengths, Packing(30, policy), dp_size * micro_packs * accumulation))
    hands = [deal(step.packs, rank, dp_size, micro_packs) for rank in range(dp_size)]
    assert all([len(batch) for batch in hand] == [micro_packs] * accumulation for hand in hands)
    assert sorted(pack for hand in hands for batch in hand for pack in batch) == sorted(step.packs)


def test_dealing_balances_attention_area():
    lengths = long_tail(4000, 4)
    stream = PackStream(lengths, Packing(32768), 32)
    ratios, contiguous = [], []
    for _ in range(12):
        packs = next(stream).packs
        weights = [sum(pack_weight(p) for batch in deal(packs, rank, 4, 2) for p in batch) for rank in range(4)]
        ratios.append(max(weights) / np.mean(weights))
        weights = [sum(map(pack_weight, packs[rank * 8 : rank * 8 + 8])) for rank in range(4)]
        contiguous.append(max(weights) / np.mean(weights))
    assert np.mean(ratios) < 1.1 < np.mean(contiguous)


def test_a_count_that_does_not_divide_names_what_would():
    packs = [()] * 10
    with pytest.raises(
        ValueError, match=r"packs_per_step=10 .* multiple of 4. Nearest that fit: 8 or 12, or .*micro_packs=1 or 5"
    ):
        deal(packs, 0, 2, 2)
    with pytest.raises(ValueError, match=r"packs_per_step=3 .* multiple of 8. Nearest that fit: 8.$"):
        deal(packs[:3], 0, 4, 2)
    with pytest.raises(ValueError, match=r"rank is 2"):
        deal(packs, 2, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pack_tokens": 0}, r"data\.pack_tokens is 0"),
        ({"pack_tokens": 1 << 25}, r"data\.pack_tokens is 33554432; it must be a whole number from 1 to 16777216"),
        ({"window": 0}, r"packing: window is 0; it must be a whole number from 1 to"),
        ({"max_delay_steps": 0}, r"data\.max_delay_steps is 0"),
        ({"policy": "random"}, r"packing: unknown policy 'random'; known ones are best_fit, balanced, concat"),
        ({"long_documents": "hide"}, r"long_documents: unknown choice 'hide'; known ones are cut, keep, drop"),
        ({"long_documents": "keep"}, r"long_documents=keep with data\.max_document_tokens=None; the limit is needed"),
        ({"max_document_tokens": 99}, r"long_documents=cut with data\.max_document_tokens=99; the limit is needed"),
        (
            {"long_documents": "keep", "max_document_tokens": 7},
            r"max_document_tokens \(at least a pack\) is 7; it .* from 8 to",
        ),
        ({"curriculum": 5}, r"data\.curriculum is 5; give \[\[step, pack_tokens\], \.\.\.\]"),
        ({"curriculum": [[5]]}, r"data\.curriculum is \[\[5\]\]; give"),
        ({"curriculum": [[5, 0]]}, r"data\.curriculum\[0\]\[1\] is 0"),
        ({"curriculum": [[1, 9]]}, r"the steps \[1\]; they must ascend and begin after step 1"),
        ({"curriculum": [[9, 16], [9, 32]]}, r"the steps \[9, 9\]; they must ascend"),
    ],
)
def test_settings_out_of_range_are_refused(change, named):
    with pytest.raises(ValueError, match=named):
        Packing(**{"pack_tokens": 8, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"packs_per_step": 0}, r"train\.packs_per_step is 0"),
        ({"seed": -1}, r"train\.seed is -1"),
        ({"lengths": []}, "no token at all"),
        ({"lengths": [0, 0]}, "no token at all"),
    ],
)
def test_streams_of_nothing_are_refused(change, named):
    with pytest.raises(ValueError, match=named):
        PackStream(**{"lengths": [4], "packing": Packing(8), "packs_per_step": 2, **change})
    with pytest.raises(ValueError, match="step is 0"):
        PackStream([4], Packing(8), 2).seek(0)
