"""Documents: a packed micro-batch from what a loop gives of it, the same on all ranks of an SP group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from hsap.data.batch import MicroBatch, build_micro_batch
from hsap.data.packing.packs import Piece
from hsap.data.store import DocumentStore
from hsap.ir.layout import Layout
from hsap.planning.compiling import Shape
from hsap.runtime.groups import Mesh
from hsap.targets import NO_TARGET

_MAX_LABEL = (1 << 31) - 1


def micro_batch(lengths: Iterable[int], labels: object, sequences: Sequence[int] | None) -> MicroBatch:
    """Make the micro-batch of documents given by their lengths, and labels if there are any."""
    layout = Layout.from_lengths(lengths, sequences)
    if labels is None:
        labels = np.full(layout.num_tokens, NO_TARGET)
    labels = torch.as_tensor(labels).cpu().numpy()
    if labels.shape != (layout.num_tokens,):
        raise ValueError(
            f"sequence parallel: labels have shape {list(labels.shape)}, the documents {layout.num_tokens} tokens "
            "together; give one label a token, documents one after the other, not shifted"
        )
    if labels.size and (labels.dtype.kind not in "iu" or labels.max() > _MAX_LABEL or (labels[labels < 0] + 100).any()):
        raise ValueError(
            f"sequence parallel: labels are {labels.dtype} from {labels.min()} to {labels.max()}; give the ids of "
            f"tokens, whole numbers from 0 to {_MAX_LABEL}, and {NO_TARGET} where a token isn't trained"
        )
    names = tuple(map(str, range(layout.num_documents)))
    store = DocumentStore(labels.astype(np.int32), layout.cu_seqlens, names, labels != NO_TARGET)
    pieces = iter([Piece(i, 0, length) for i, length in enumerate(layout.lengths)])
    packs = [tuple(next(pieces) for _ in range(count)) for count in layout.sequences]
    return build_micro_batch(store, packs, max(layout.num_tokens, 1))


def check_same(shape: Shape, labels: np.ndarray | None, mesh: Mesh, device: torch.device) -> None:
    """Refuse a batch whose labels aren't those of the group's other ranks: a plan only knows lengths, and blocks of
    text that all have one length are the usual case. Collective over the SP group; now and then is enough for loaders
    that draw by rank, and it waits for the device.

    labels: int32 [all tokens]; None where the batch has none.
    """
    if mesh.topology.num_ranks == 1:
        return
    content = b"" if labels is None else np.ascontiguousarray(labels).tobytes()
    digest = hashlib.sha256(repr((shape, labels is not None)).encode() + content).digest()
    mine = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
    others = [torch.empty_like(mine) for _ in range(mesh.topology.num_ranks)]
    dist.all_gather(others, mine, group=mesh.sp)
    differing = [rank for rank, other in enumerate(others) if other.item() != mine.item()]
    if differing:
        raise ValueError(
            f"sequence parallel: rank {mesh.sp_rank} of SP group {mesh.dp_rank} was given a batch whose "
            f"lengths or labels aren't those of rank {differing[0]} of its group; every rank of an SP group must "
            "load the same documents: draw them by dp_rank, not by rank"
        )
