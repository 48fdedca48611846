"""A1 … A5 on cells whose names can be read off the layout."""

import numpy as np

from hsap.ir.block import Shards, cut_blocks
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, mask_slices
from hsap.ir.pattern import Pattern, patterns


def names(lengths, size, mask="causal", spans=None):
    layout = Layout.from_lengths(lengths)
    borders = range(0, layout.num_tokens, size)
    spans = spans or [[[at, min(at + size, layout.num_tokens)]] for at in borders]
    shards = Shards.of(list(enumerate(spans)))
    blocks = cut_blocks(shards, mask_slices(layout, Mask.parse(mask)))
    named = patterns(shards, blocks)
    return {(int(q), int(kv)): Pattern(p).name for q, kv, p in zip(blocks.q, blocks.kv, named, strict=True)}


def test_each_name():
    # Tokens 0-3, 4-7, 8-11 are the shards; one document from token 2 to token 10.
    got = names([2, 8, 2], 4)
    assert got == {(0, 0): "A1", (1, 0): "A4", (2, 0): "A5", (1, 1): "A1", (2, 1): "A3", (2, 2): "A1"}
    assert names([12], 4)[2, 0] == "A2"


def test_many_documents_on_the_diagonal_are_a1():
    assert names([1, 1, 1, 1, 1, 3], 4) == {(0, 0): "A1", (1, 1): "A1"}


def test_other_masks_and_other_shards_have_no_name():
    full = names([8], 4, "full")
    assert full[0, 0] == full[0, 1] == full[1, 1] == "OTHER"
    assert set(names([12], 4, "window:3").values()) == {"OTHER"}
    striped = names([8], 4, spans=[[[0, 2], [6, 8]], [[2, 6]]])
    assert striped[0, 0] == striped[0, 1] == striped[1, 0] == "OTHER"


def test_no_blocks_no_names():
    shards = Shards.of([])
    assert len(patterns(shards, cut_blocks(shards, np.zeros((0, 6), np.int64)))) == 0
