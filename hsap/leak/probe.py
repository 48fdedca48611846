"""Probe: a batch runs as it is, twice, then with some of its tokens changed, then with its documents in another order.

Where the two equal runs agree in every bit, so must all rows that the masks keep from a change; where they don't (on
GPUs gradients are added up in any order), rows may differ by a multiple of what those two differ by. In another order,
documents are cut and added up otherwise, so there a document as a whole may differ by rounding, as much as
`hsap.leak.compare.MOVED`.
Without the longest of them, too: nobody sees its tokens, but a model may reckon with its length (rotary scaling by the
longest position, say).
Only values are compared: positions that run on from one document to the next show where a model adds them up (learned
positions), and change nothing but rounding where it turns by differences of them (rotary embedding), nor need they.

Weights, their gradients, buffers and torch's random state are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hsap.leak.changes import Batch, Change, changed, choose
from hsap.leak.compare import differences, fewer, floors, found, moved, opposite, undecided
from hsap.leak.hooks import Hooks
from hsap.leak.ranks import BACKWARD, FORWARD, Everywhere, Seen
from hsap.leak.report import Leak, LeakReport

Run = Callable[[np.ndarray, np.ndarray | None], tuple[Tensor, np.ndarray]]
"""Forward of a batch: (its tokens, the order of its documents or of some, None for the given one) -> (output, rows).

output: this rank's sum of losses, or what its rows come out as; rows: their positions in the packed batch as it was
laid, int64 [T]. Every run gets the tokens in the given order."""
FLOOR_TIMES = 16
ORDER = "another order of the documents"


def probe(
    model: nn.Module,
    batch: Batch,
    run: Run,
    *,
    group: dist.ProcessGroup | None = None,
    deep: bool | None = None,
    bound: float | None = None,
    moves: bool = True,
    leaves: bool = False,
) -> LeakReport:
    """Look for leaks between the documents of a batch; the same report on all ranks of the group that holds its rows.

    Collective over the group; None: this process alone has them. deep: see `Hooks`. bound: what rows may differ by, of
    a row's size (None: as said above). moves: whether documents are also laid in another order; leaves: and without
    the longest one of them, in an order that lacks it.
    """
    changes, everywhere = choose(batch), Everywhere(group)
    leaks: list[Leak] = []
    with Hooks(model, deep) as hooks, _untouched(model) as restore:

        def go(tokens: np.ndarray, order: np.ndarray | None = None) -> Seen:
            restore()
            return _run(hooks, run, tokens, order)

        first = go(batch.tokens)
        names = everywhere.names(first)
        drew = everywhere.any(first.drew)
        goes_back = everywhere.any(any(bool(s.digest.any()) for s in first.sketches[BACKWARD].values()))
        floor = floors(everywhere, first, go(batch.tokens))
        if why := undecided(everywhere, names, batch, first, floor, bound or 0.0):
            return LeakReport(f"{_counted(batch)}: {why}", undecided=why)
        bounds = dict.fromkeys(names, bound or 0.0)
        for (way, _), most in floor.items():
            bounds[way] = max(bounds[way], FLOOR_TIMES * most)
        for change in changes:
            other = go(changed(batch, change))
            worst = everywhere.largest(differences(hooks, batch, change, first, other), len(batch.lengths))
            leaks += found(hooks, names, worst, batch, change.told, bounds.__getitem__)
        if moves and not drew:
            order = opposite(batch)
            leaks += moved(hooks, everywhere, names, batch, first, go(batch.tokens, order), order, ORDER)
        leaves = moves and leaves and not drew and len(batch.lengths) > 1
        if leaves and not leaks:
            order, without = fewer(batch), batch.names[int(np.argmax(batch.lengths))]
            other = go(batch.tokens, order)
            # Gradients may be those of a mean over all that is there.
            other = replace(other, sketches={FORWARD: other.sketches[FORWARD], BACKWARD: {}})
            leaks += moved(hooks, everywhere, names, batch, first, other, order, f"a batch without document {without}")
    kept = "keep every bit" if not any(bounds.values()) else f"stay within {max(bounds.values()):.1g} of a row's size"
    told = _told(batch, changes, kept, sum(map(len, names.values())))
    if len(batch.lengths) == 1:
        told += "; being alone it can't show whether one document reaches another: check a batch of several"
    else:
        told += _told_of_orders(moves, leaves, drew)
    if not goes_back:
        told += "; gradients are all 0 and so show nothing: for them, give documents with targets"
    return LeakReport(told, tuple(dict.fromkeys(leaks)))


def _told(batch: Batch, changes: Sequence[Change], kept: str, number: int) -> str:
    distinct = ", ".join(dict.fromkeys(change.told for change in changes))
    return (
        f"{_counted(batch)}: with {distinct} changed{' one by one' * (', ' in distinct)}, all rows that the masks keep "
        f"from it {kept} in {number} hidden states and gradients"
    )


def _told_of_orders(moves: bool, leaves: bool, drew: bool) -> str:
    if not moves:
        return ""
    if drew:
        return "; random numbers are drawn in the forward, so documents weren't laid otherwise: for that, model.eval()"
    otherwise = "in another order" + (" or without the longest one" if leaves else "")
    return f", and with documents {otherwise} each stays the same but for rounding"


def _counted(batch: Batch) -> str:
    return f"{len(batch.lengths)} document{'s' * (len(batch.lengths) != 1)} of {len(batch.tokens):,} tokens"


@contextmanager
def _untouched(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Leave buffers and torch's random state as they are, whatever happens; gives what puts buffers back meanwhile.
    Modules of dropout hide nothing until then: in another order they would hide others."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    dropping = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.training]

    def restore() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])

    for module in dropping:
        module.eval()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield restore
    finally:
        for module in dropping:
            module.train()
        restore()


def _run(hooks: Hooks, run: Run, tokens: np.ndarray, order: np.ndarray | None) -> Seen:
    torch.manual_seed(0)  # whatever else a model draws is the same
    before = _random_states()
    hooks.start()
    with torch.enable_grad():
        output, rows = run(tokens, order)
        hooks.stop(output)
        if not hooks.inputs or hooks.num_rows < len(rows):
            raise ValueError(
                "leak check: no module of the model gave a row of floating-point numbers for every token; give the "
                "model that the forward runs, with one row of packed documents, [T] or [1, T]"
            )
        if not output.requires_grad:
            raise ValueError(
                "leak check: the forward's output has no gradient, and gradients are compared, too; run it without "
                "torch.no_grad() and detach()"
            )
        drew = not all(map(torch.equal, before, _random_states()))
        try:
            hooks.gradients(_scalar(output))
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise ValueError(
                "leak check: layers are made again in backward by torch's reentrant checkpoint, which gives no "
                "gradients of hidden states; take use_reentrant=False, or check without checkpointing"
            ) from error
    sketches = {
        way: {name: sketch.first(len(rows)) for name, sketch in of_way.items()}
        for way, of_way in ((FORWARD, hooks.forward), (BACKWARD, hooks.backward))
    }
    return Seen(sketches, np.asarray(rows), drew)


def _random_states() -> list[Tensor]:
    """torch's, of the CPU and of this process's GPU."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])


def _scalar(output: Tensor) -> Tensor:
    """A sum over rows: of losses as it is, of logits by fixed numbers, so that every one has a gradient."""
    if output.numel() == 1:
        return output.reshape(())
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, output.shape[-1:], generator=generator) * 2 - 1
    return (output.float() * signs.to(output.device)).sum()
