"""Micro-batches made by hand."""

import numpy as np

from hsap.data.batch import MicroBatch


def micro_batch(lengths, **changes) -> MicroBatch:
    """Documents of these lengths, named a, b, and so on; every token but a document's last has a target."""
    num_tokens = sum(lengths)
    tokens = np.arange(num_tokens, dtype=np.int32) % 90 + 2
    labels = np.roll(tokens, -1)
    labels[np.cumsum(lengths) - 1] = -100
    fields = {
        "tokens": tokens,
        "labels": labels,
        "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        "lengths": tuple(lengths),
        "sequences": (len(lengths),),
        "document_ids": tuple(chr(ord("a") + i) for i in range(len(lengths))),
        "num_targets": num_tokens - len(lengths),
        "padding_share": 0.0,
    }
    return MicroBatch(**fields | changes)
