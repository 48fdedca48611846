"""Probe: a batch runs as it is, twice, then with some of its tokens changed, then with its documents in another order.

Where the two equal runs agree in every bit, so must all rows that the masks keep from a change; where they don't (on
GPUs gradients are added up in any order), rows may differ by a multiple of what those two differ by. In another order,
documents are cut and added up otherwise, so there a document as a whole may differ by rounding, as much as
`hsap.leak.compare.MOVED`.
Only values are compared: positions that run on from one document to the next show where a model adds them up (learned
positions), and change nothing but rounding where it turns by differences of them (rotary embedding), nor need they.

Weights, their gradients, buffers and torch's random state are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hsap.leak.changes import Batch, changed, choose
from hsap.leak.compare import differences, floors, found, moved, opposite
from hsap.leak.ranks import BACKWARD, FORWARD, Everywhere, Seen
from hsap.leak.report import LeakReport
from hsap.leak.watch import Watch

Run = Callable[[np.ndarray, np.ndarray | None], tuple[Tensor, np.ndarray]]
"""Forward of a batch: (its tokens, the order of its documents, None for the given one) -> (output, rows).

output: this rank's sum of losses, or what its rows come out as; rows: their positions in the packed batch as it was
laid, int64 [T]. Every run gets the tokens in the given order."""
FLOOR_TIMES = 16


def probe(
    model: nn.Module,
    batch: Batch,
    run: Run,
    *,
    group: dist.ProcessGroup | None = None,
    deep: bool | None = None,
    bound: float | None = None,
    moves: bool = True,
) -> LeakReport:
    """Look for leaks between the documents of a batch; the same report on all ranks of the group that holds its rows.

    Collective over the group; None: this process alone has them. deep: see `Watch`. bound: what rows may differ by, of
    a row's size (None: as said above). moves: whether documents are also laid in another order.
    """
    changes, everywhere = choose(batch), Everywhere(group)
    leaks = []
    with Watch(model, deep) as watch, _untouched(model):
        first = _run(watch, batch, run, batch.tokens)
        names = everywhere.names(first)
        floor = floors(everywhere, first, _run(watch, batch, run, batch.tokens))
        bounds = {way: max(float(bound or 0), FLOOR_TIMES * most) for way, most in floor.items()}
        for change in changes:
            other = _run(watch, batch, run, changed(batch, change))
            worst = everywhere.largest(differences(watch, batch, change, first, other), len(batch.lengths))
            leaks += found(watch, names, worst, batch, change.told, bounds.__getitem__)
        if moves:
            other = _run(watch, batch, run, batch.tokens, opposite(batch))
            leaks += moved(watch, everywhere, names, batch, first, other)
    what = sum(len(of_way) for of_way in names.values())
    distinct = ", ".join(dict.fromkeys(change.told for change in changes))
    kept = "keep every bit" if not any(bounds.values()) else f"stay within {max(bounds.values()):.1g} of a row's size"
    alone = len(batch.lengths) == 1
    told = (
        f"{len(batch.lengths)} document{'s' * (not alone)} of {len(batch.tokens):,} tokens: with {distinct} changed"
        f"{' one by one' * (', ' in distinct)}, all rows that the masks keep from it {kept} in {what} hidden states "
        "and gradients"
    )
    if alone:
        told += "; being alone it can't show whether one document reaches another: check a batch of several"
    elif moves:
        told += ", and with documents in another order each stays the same but for rounding"
    return LeakReport(told, tuple(dict.fromkeys(leaks)))


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Leave buffers and torch's random state as they are. Meanwhile modules of dropout hide nothing: in another order
    they would hide others."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    dropping = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.training]
    for module in dropping:
        module.eval()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        yield
    for module in dropping:
        module.train()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])


def _run(watch: Watch, batch: Batch, run: Run, tokens: np.ndarray, order: np.ndarray | None = None) -> Seen:
    torch.manual_seed(0)  # whatever else a model draws is the same
    watch.start()
    with torch.enable_grad():
        output, rows = run(tokens, order)
        watch.stop()
        if not watch.inputs:
            raise ValueError(
                "leak check: no module of the model gave a row of floating-point numbers for every token; give the "
                "model that the forward runs, with one row of packed documents, [T] or [1, T]"
            )
        watch.gradients(_scalar(output))
    sketches = {
        way: {name: sketch.first(len(rows)) for name, sketch in of_way.items()}
        for way, of_way in ((FORWARD, watch.forward), (BACKWARD, watch.backward))
    }
    return Seen(sketches, np.asarray(rows))


def _scalar(output: Tensor) -> Tensor:
    """A sum over rows: of losses as it is, of logits by fixed numbers, so that every one has a gradient."""
    if output.numel() == 1:
        return output.reshape(())
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, output.shape[-1:], generator=generator) * 2 - 1
    return (output.float() * signs.to(output.device)).sum()
