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


@given(st.lists(random_slice(), min_size=1, max_size=3), st.integers(1, 6))
def test_squares_are_full_or_square_but_for_narrow_bands(rows, narrow):
    table = sl.canonical(sl.slices(rows))
    pieces, origin = sl.squares(table, narrow)
    assert (np.diff(origin) >= 0).all()
    for source in range(len(table)):
        own = table[source : source + 1]
        mine, kinds = pieces[origin == source], sl.kinds(pieces[origin == source])
        assert (sl.canonical(mine) == mine).all()
        assert (sl.dense(mine, SIZE) == sl.dense(own, SIZE)).all()
        if own[0, sl.HI] - own[0, sl.LO] + 1 < narrow and sl.kinds(own)[0] == sl.Kind.BAND:
            assert (mine == own).all()
            continue
        if sl.kinds(own)[0] != sl.Kind.BAND:
            assert len(mine) <= 3
        assert sl.Kind.BAND not in kinds
        for (q0, q1, k0, k1, lo, hi), kind in zip(mine, kinds, strict=True):
            if kind != sl.Kind.FULL:
                assert q1 - q0 == k1 - k0 and (hi if kind == sl.Kind.CAUSAL else lo) == k0 - q0


@given(st.lists(random_slice(), max_size=3), st.integers(1, SIZE))
def test_strips_are_no_taller_than_asked(rows, height):
    table = sl.canonical(sl.slices(rows))
    pieces, owner = sl.strips(table, np.full(len(table), height))
    assert (sl.dense(pieces, SIZE) == sl.dense(table, SIZE)).all()
    assert (pieces[:, sl.Q1] - pieces[:, sl.Q0] <= height).all()
    assert np.array_equal(np.bincount(owner, minlength=len(table)), -(-(table[:, sl.Q1] - table[:, sl.Q0]) // height))


@given(random_slice())
def test_mirrored_slices_show_the_pairs_from_the_other_end(row):
    table = sl.canonical(sl.slices([row]))
    turned = sl.mirror(table)
    turned[:, :4] += SIZE
    assert (sl.dense(turned, SIZE) == sl.dense(table, SIZE)[::-1, ::-1]).all()
    assert (sl.canonical(turned) == turned).all()


def test_long_bands_make_few_pieces():
    n = 131_072
    table = sl.canonical(sl.slices([(0, n, 0, n, -4095, 0), (0, n, 0, 64, -sl.UNBOUNDED, -4096)]))
    assert len(sl.squares(table)[0]) <= 2 * n // 4096 + 3


def test_area_has_no_overflow_at_sixteen_million_tokens():
    n = 1 << 24
    table = sl.canonical(sl.slices([(0, n, 0, n, -sl.UNBOUNDED, 0)]))
    assert sl.area(table)[0] == n * (n + 1) // 2
    assert np.array_equal(table[0], [0, n, 0, n, 1 - n, 0])


def cut_by_a_grid(random, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A band over n tokens and its pieces, row by row."""
    lo, hi = sorted(random.integers(-n, n + 1, 2).tolist())
    lo, hi = (-sl.UNBOUNDED if random.random() < 0.3 else lo), (sl.UNBOUNDED if random.random() < 0.3 else hi)
    whole = sl.canonical(sl.slices([(0, n, 0, n, lo, hi)]))
    sides = []
    for _ in range(2):
        borders = np.unique([0, n, *random.integers(0, n + 1, random.integers(0, 6))])
        sides.append(np.stack([borders[:-1], borders[1:]], axis=1))
    pieces, strip, _ = sl.cut(whole, *sides)
    return whole, pieces[np.lexsort([pieces[:, sl.K0], strip])]


def test_what_a_grid_cut_is_joined_again():
    random = np.random.default_rng(0)
    for _ in range(300):
        whole, pieces = cut_by_a_grid(random, int(random.integers(1, 24)))
        table, owner = sl.joined(pieces, np.zeros(len(pieces), np.int64))
        assert table.tolist() == whole.tolist() and owner.tolist() == [0] * len(whole)


def test_joining_keeps_the_pairs_of_each_owner():
    random, fewer = np.random.default_rng(1), 0
    for _ in range(300):
        n = int(random.integers(1, 24))
        _, pieces = cut_by_a_grid(random, n)
        pieces = pieces[random.random(len(pieces)) < 0.7]
        owners = np.sort(random.integers(0, 2, len(pieces)))
        table, owner = sl.joined(pieces, owners)
        assert np.array_equal(sl.canonical(table), table)
        for who in (0, 1):
            assert np.array_equal(sl.dense(table[owner == who], n), sl.dense(pieces[owners == who], n))
        fewer += len(pieces) - len(table)
    assert fewer > 300
