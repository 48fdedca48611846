"""Compare: which rows of two runs differ that should not, and in which layer that begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from hsap.leak.changes import Batch, Change, order_rows
from hsap.leak.hooks import Hooks
from hsap.leak.ranks import BACKWARD, FORWARD, Everywhere, Key, Seen
from hsap.leak.reach import backward_reach, forward_reach
from hsap.leak.report import MAX_NAMED, Leak
from hsap.leak.sketch import NUM_PARTS, Sketch

MOVED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
"""By what a document may differ in another place, of its own size."""
_TINY = 1e-30
_FAINT = 1e-12
"""Of rows that differ, but by less than what is kept of them shows."""


def _distances(one: Sketch, other: Sketch, size: float) -> np.ndarray:
    """By how much rows differ, over a row's size: float64 [T]; 0 only where every bit is the same."""
    same = (one.digest == other.digest).numpy()
    apart = (other.parts.double() - one.parts.double()).square().mean(dim=1).sqrt().numpy() / max(size, _TINY)
    apart = np.where(np.isfinite(apart), apart, np.inf)
    return np.where(same, 0.0, np.maximum(apart, _FAINT))


def _may_move(dtype: torch.dtype | None) -> float:
    """By what rounding may change a document, of its own size."""
    return MOVED.get(dtype or torch.float32, MOVED[torch.float32])


def _size(sketch: Sketch) -> float:
    """Root mean square of a row's norm, of those that are finite."""
    squares = sketch.parts.double().square().mean(dim=1)
    finite = squares[torch.isfinite(squares)]
    return float(finite.mean().sqrt()) if len(finite) else 0.0


def floors(everywhere: Everywhere, first: Seen, again: Seen) -> dict[Key, float]:
    """By (direction, module), the most that two runs of the same batch differ by."""
    own: dict[Key, np.ndarray] = {
        (way, name): np.array(_distances(sketch, again.sketches[way][name], _size(sketch)).max(initial=0.0))
        for way, of_way in first.sketches.items()
        for name, sketch in of_way.items()
        if name in again.sketches[way]
    }
    return {key: float(most) for key, most in everywhere.largest(own).items()}


def undecided(
    everywhere: Everywhere,
    names: dict[str, list[str]],
    batch: Batch,
    first: Seen,
    floor: Mapping[Key, float],
    bound: float,
) -> str:
    """Why nothing can be told of a batch, in words; empty where something can.

    Gradients that aren't finite have no bits to keep, and against runs that differ by themselves no leak would show.
    """
    index = np.searchsorted(batch.borders, first.rows, side="right") - 1
    own = np.zeros(len(batch.lengths))
    for sketch in first.sketches[BACKWARD].values():
        own[index[~torch.isfinite(sketch.parts).all(dim=1).numpy()]] = 1.0
    if broken := np.flatnonzero(everywhere.largest({(BACKWARD,): own}, len(own))[BACKWARD,]).tolist():
        more = f" and {len(broken) - MAX_NAMED} more" if len(broken) > MAX_NAMED else ""
        named = ", ".join(batch.names[i] for i in broken[:MAX_NAMED]) + more
        return (
            f"nothing can be told: gradients of {named} aren't finite; look for what is infinite there, in weights, "
            "number format or rows that see nothing"
        )
    most = everywhere.largest(
        {
            (way, name): np.array(max(bound, _may_move(sketch.dtype)))
            for way, of_way in first.sketches.items()
            for name, sketch in of_way.items()
        }
    )
    order: list[Key] = [(FORWARD, name) for name in names[FORWARD]]
    order += [(BACKWARD, name) for name in names[BACKWARD][::-1]]
    key = next((key for key in order if floor.get(key, 0.0) > most[key]), None)
    if key is None:
        return ""
    what = "hidden states" if key[0] == FORWARD else "gradients"
    return (
        f"nothing can be told: two runs of the same batch differ by {floor[key]:.1e} of a row's size, first in the "
        f"{what} of {key[1]}, and beside that no leak shows; for the check let the model keep nothing from one forward "
        "to the next, and draw no random numbers but torch's"
    )


def differences(hooks: Hooks, batch: Batch, change: Change, first: Seen, other: Seen) -> dict[Key, np.ndarray]:
    """By (direction, module), where there are any, of each document the largest difference among this rank's rows that
    the masks keep from the change: float64 [documents]."""
    reached = forward_reach(change.mark(len(batch.tokens)), batch.layers, batch.masks)
    may = {FORWARD: reached, BACKWARD: backward_reach(reached, batch.layers, batch.masks)}
    documents = np.searchsorted(batch.borders, first.rows, side="right") - 1
    depths = _depths(hooks, list(first.sketches[FORWARD]), len(batch.layers))
    worst: dict[Key, np.ndarray] = {}
    for way, of_way in first.sketches.items():
        for name, sketch in of_way.items():
            if name not in other.sketches[way]:
                continue
            apart = _distances(sketch, other.sketches[way][name], _size(sketch))
            apart[may[way][depths.get((way, name), 0 if way == BACKWARD else -1)][first.rows]] = 0.0
            if apart.any():
                worst[way, name] = np.zeros(len(batch.lengths))
                np.maximum.at(worst[way, name], documents, apart)
    return worst


def _depths(hooks: Hooks, names: list[str], num_layers: int) -> dict[tuple[str, str], int]:
    """By (direction, module) how many of the layers are to be reckoned behind its output, as `forward_reach` counts.

    What a layer is made of has that layer's attention behind it or ahead, whichever lets rows see more. Empty for a
    model whose layers aren't the masks': all may be behind, and all ahead.
    """
    if len(hooks.layers) != num_layers:
        return {}
    place = {layer: i for i, layer in enumerate(hooks.layers)}
    depths, depth = {}, 0
    for name in names:
        plain = name.partition("#")[0]
        layer = hooks.layer_of(plain)
        depth = depth if layer is None else max(depth, place[layer] + 1)
        depths[FORWARD, name] = depth
        depths[BACKWARD, name] = depth if layer in (None, plain) else place[layer]
    return depths


def found(
    hooks: Hooks,
    names: dict[str, list[str]],
    worst: Mapping[Key, np.ndarray],
    batch: Batch,
    told: str,
    bound_of: Callable[[str], float],
) -> list[Leak]:
    """The leaks among differences: of hidden states if there are any, else of gradients.

    worst: by (direction, module), of each document the largest one.
    """
    for way in (FORWARD, BACKWARD):
        over = {key[1]: sizes for key, sizes in worst.items() if key[0] == way and (sizes > bound_of(way)).any()}
        if not over:
            continue
        order = names[way] if way == FORWARD else names[way][::-1]
        module = next(name for name in order if name in over)
        most = np.max(list(over.values()), axis=0)
        documents = sorted(np.flatnonzero(most > bound_of(way)).tolist(), key=lambda i: most[i], reverse=True)
        where = _layer(hooks, names[FORWARD], module, way)
        named = tuple(batch.names[document] for document in documents[:MAX_NAMED])
        return [Leak(told, way, where, module, named, len(documents), float(most.max()), bound_of(way))]
    return []


def _layer(hooks: Hooks, names: list[str], module: str, way: str) -> str:
    """The layer in which a difference arises that a module's output, or its gradient, is the first to have."""
    plain = module.partition("#")[0]
    layer = hooks.layer_of(plain)
    if way == BACKWARD and layer in (None, plain) and module in names:
        # The gradient of what leaves a layer comes from the one above.
        behind = [hooks.layer_of(name) or name for name in names[names.index(module) + 1 :]]
        return next((name for name in behind if name != layer), plain)
    return layer or plain


def moved(
    hooks: Hooks,
    everywhere: Everywhere,
    names: dict[str, list[str]],
    batch: Batch,
    first: Seen,
    other: Seen,
    order: np.ndarray,
    told: str,
) -> list[Leak]:
    """Leaks that show when documents are laid otherwise, in an order that may have some of them only, as `other` was.

    Of directions and documents that both have.
    """
    came_from = order_rows(batch.lengths, order.tolist())
    one, same = (
        everywhere.sums(_totals(batch, seen, rows), len(batch.lengths), NUM_PARTS + 1)
        for seen, rows in ((first, first.rows), (other, came_from[other.rows]))
    )
    dtypes = {key: sketch.dtype for of_way in first.sketches.values() for key, sketch in of_way.items()}
    worst = {}
    for key in one.keys() & same.keys():
        size, apart = np.sqrt(one[key][:, -1]), (one[key] - same[key])[:, :-1]
        # A document that hardly matters, one without targets say, is measured against the others.
        usual = np.sqrt(one[key][:, -1].sum() / max(len(batch.tokens), 1) * np.array(batch.lengths)) * 1e-2
        apart = np.sqrt(np.square(apart).mean(axis=1)) / np.maximum(np.maximum(size, usual), _TINY)
        apart = np.where(np.isfinite(apart), apart, np.inf)
        over = np.zeros(len(batch.lengths), dtype=bool)
        over[order[apart[order] > _may_move(dtypes.get(key[1]))]] = True
        worst[key] = np.where(over, apart, 0.0)
    leaks = found(hooks, names, worst, batch, told, lambda _: 0.0)
    return [replace(leak, bound=_may_move(dtypes.get(leak.module))) for leak in leaks]


def opposite(batch: Batch) -> np.ndarray:
    """The documents' opposite order."""
    return np.arange(len(batch.lengths))[::-1]


def fewer(batch: Batch) -> np.ndarray:
    """The documents without the longest one, in their order."""
    return np.delete(np.arange(len(batch.lengths)), np.argmax(batch.lengths) if batch.lengths else [])


def _totals(batch: Batch, seen: Seen, rows: np.ndarray) -> dict[Key, np.ndarray]:
    """By (direction, module): of each document its rows' parts with signs by their place in it, and their squares.

    float64 [documents, parts + 1]: sums over this rank's rows. rows: their positions in the given order.
    """
    documents = np.searchsorted(batch.borders, rows, side="right") - 1
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=max(batch.lengths, default=1))
    sign = signs[rows - batch.borders[documents]]
    out: dict[Key, np.ndarray] = {}
    for way, of_way in seen.sketches.items():
        for name, sketch in of_way.items():
            parts = sketch.parts.double().numpy()
            columns = np.concatenate([parts * sign[:, None], np.square(parts).mean(axis=1, keepdims=True)], axis=1)
            total = np.zeros((len(batch.lengths), columns.shape[1]))
            np.add.at(total, documents, columns)
            out[way, name] = total
    return out
