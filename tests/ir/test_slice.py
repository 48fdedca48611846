"""Slices against the dense mask they stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsap.ir import slice as sl

SIZE = 14


@st.composite
def random_slice(draw):
    q0, q1 = sorted((draw(st.integers(0, SIZE)), draw(st.integers(0, SIZE))))
    k0, k1 = sorted((draw(st.integers(0, SIZE)), draw(st.integers(0, SIZE))))
    lo = draw(st.one_of(st.just(-sl.UNBOUNDED), st.integers(-SIZE, SIZE)))
    hi = draw(st.one_of(st.just(sl.UNBOUNDED), st.integers(-SIZE, SIZE)))
    return (q0, q1, k0, k1, lo, hi)


@st.composite
def span_set(draw):
    cuts = sorted(draw(st.sets(st.integers(1, SIZE - 1), max_size=5)))
    return np.array(list(zip([0, *cuts], [*cuts, SIZE], strict=True)))


@given(random_slice())
def test_canonical_form_keeps_the_pairs_and_counts_them(row):
    table = sl.slices([row])
    canonical = sl.canonical(table)
    want = sl.dense(table, SIZE)
    assert (sl.dense(canonical, SIZE) == want).all()
    assert sl.area(canonical).sum() == want.sum()
    if len(canonical):
        q0, q1, k0, k1, lo, hi = canonical[0]
        assert want[q0:q1].any(axis=1).all() and want[:, k0:k1].any(axis=0).all()
        assert (sl.canonical(canonical) == canonical).all()


@given(random_slice())
def test_kinds_say_which_side_is_cut(row):
    table = sl.canonical(sl.slices([row]))
    for (q0, q1, k0, k1, _, _), kind in zip(table, sl.kinds(table), strict=True):
        mask = sl.dense(table, SIZE)[q0:q1, k0:k1]
        above = not mask[0, -1]
        below = not mask[-1, 0]
        assert kind == above * sl.Kind.CAUSAL + below * sl.Kind.INV_CAUSAL
        assert (kind == sl.Kind.FULL) == bool(mask.all())


@given(random_slice(), span_set(), span_set())
def test_cut_partitions_the_pairs(row, q_spans, k_spans):
    table = sl.slices([row])
    pieces, q_index, k_index = sl.cut(table, q_spans, k_spans)
    assert (sl.dense(pieces, SIZE) == sl.dense(table, SIZE)).all()
    assert (sl.area(pieces) > 0).all()
    assert (pieces[:, sl.Q0] >= q_spans[q_index, 0]).all() and (pieces[:, sl.Q1] <= q_spans[q_index, 1]).all()
    assert (pieces[:, sl.K0] >= k_spans[k_index, 0]).all() and (pieces[:, sl.K1] <= k_spans[k_index, 1]).all()


@given(random_slice())
def test_square_pieces_are_full_or_square_causal(row):
    table = sl.canonical(sl.slices([row]))
    pieces, origin = sl.square(table)
    assert (sl.dense(pieces, SIZE) == sl.dense(table, SIZE)).all()
    kinds = sl.kinds(pieces)
    for (q0, q1, k0, k1, _, hi), kind, source in zip(pieces, kinds, origin, strict=True):
        if sl.kinds(table)[source] in (sl.Kind.FULL, sl.Kind.CAUSAL):
            assert kind in (sl.Kind.FULL, sl.Kind.CAUSAL)
            if kind == sl.Kind.CAUSAL:
                assert q1 - q0 == k1 - k0 and hi == k0 - q0


def test_area_has_no_overflow_at_sixteen_million_tokens():
    n = 1 << 24
    table = sl.canonical(sl.slices([(0, n, 0, n, -sl.UNBOUNDED, 0)]))
    assert sl.area(table)[0] == n * (n + 1) // 2
    assert np.array_equal(table[0], [0, n, 0, n, 1 - n, 0])
