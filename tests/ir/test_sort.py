"""Sort: the same orders and groups as NumPy's, for keys of any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.ir.sort import distinct, order_of

small, large = st.integers(-3, 3), st.integers(-(1 << 62), 1 << 62)


@settings(deadline=None)
@given(st.lists(small) | st.lists(large) | st.lists(small | large))
def test_like_numpy(keys):
    keys = np.array(keys, np.int64)
    assert np.array_equal(order_of(keys), np.argsort(keys, kind="stable"))
    values, index = distinct(keys)
    wanted, wanted_index = np.unique(keys, return_inverse=True)
    assert np.array_equal(values, wanted) and np.array_equal(index, wanted_index)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [60, 61, 62])
def test_keys_at_the_edge_of_packing(sign, bits):
    """Three keys leave 61 bits and a sign; one more would be lost if it were packed."""
    keys = sign * np.array([1 << bits, 0, (1 << bits) - 1])
    assert order_of(keys).tolist() == sorted(range(3), key=keys.tolist().__getitem__)
