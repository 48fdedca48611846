"""Stores of made-up documents for the tests of packing, batching and loading."""

import numpy as np
import pytest

from hsap.data.document import Sample
from hsap.data.store import DocumentStore


@pytest.fixture(scope="session")
def make_store():
    """Make a store whose tokens are all different, so that a token names its document and its place there."""

    def make(lengths) -> DocumentStore:
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
        return DocumentStore.from_samples(
            Sample(f"doc{i}", np.arange(starts[i], starts[i + 1], dtype=np.int32)) for i in range(len(lengths))
        )

    return make
