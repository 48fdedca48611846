"""Documents: a packed micro-batch from what a loop gives of it, the same on all ranks of an SP group."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import MicroBatch, build_micro_batch
from hsap.data.packing.packs import Piece
from hsap.data.store import DocumentStore
from hsap.ir.layout import Layout
from hsap.planning.compiling import Shape
from hsap.runtime.groups import Mesh
from hsap.runtime.upload import sent
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


class Sameness:
    """Compares every batch of an SP group among its ranks, without waiting for any: each by the time of the next.

    A plan only knows lengths, and blocks of text that all have one length are the usual case; a loader that deals
    documents by rank would train each rank's labels on another's tokens. The device is never waited for: what is
    gathered travels to the host while the batch is trained on.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self._mine = 0
        self._gathered: Tensor | None = None
        self._there: dist.Work | torch.cuda.Event | None = None

    def begin(self, shape: Shape, labels: np.ndarray | None) -> None:
        """Begin to compare a batch. Collective over the SP group. labels: int32 [all tokens]; None: it has none."""
        if self.mesh.topology.num_ranks == 1:
            return
        content = b"" if labels is None else np.ascontiguousarray(labels).data
        self._mine = zlib.crc32(content, zlib.crc32(repr((shape, labels is not None)).encode()))
        mine = sent(torch.tensor([self._mine]), self.device)
        gathered = mine.new_empty(self.mesh.topology.num_ranks)
        self._there = dist.all_gather(list(gathered.split(1)), mine, group=self.mesh.sp, async_op=True)
        self._gathered = gathered
        if self.device.type == "cuda":
            self._there.wait()  # the stream does, not the host
            self._gathered = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._gathered.copy_(gathered, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def settle(self) -> None:
        """See what came of the last comparison; ValueError, on every rank of the group, where batches differed."""
        if self._there is None or self._gathered is None:
            return
        self._there.synchronize() if isinstance(self._there, torch.cuda.Event) else self._there.wait()
        self._there = None
        assert self._gathered is not None, "it came with what was waited for"
        differing = [rank for rank, other in enumerate(self._gathered.tolist()) if other != self._mine]
        if differing:
            raise ValueError(
                f"sequence parallel: rank {self.mesh.sp_rank} of SP group {self.mesh.dp_rank} was given a batch whose "
                f"lengths or labels aren't those of rank {differing[0]} of its group; every rank of an SP group must "
                "load the same documents: draw them by dp_rank, not by rank"
            )
