"""Packing: how full, how even and how fast, on the document lengths of real corpora.

Run by `make bench-packing`. Fill is `best_fit`'s, tokens over capacity of all packs of an epoch. Area spread is
`balanced`'s: weight (sum of squared lengths) of the fullest of 8 data-parallel ranks over their mean, averaged
over the steps of an epoch; a step has 8 packs, one a rank, which is the hardest. Beside it that of `best_fit`'s steps,
and balanced's fill. Seconds and peak memory are those of going through an epoch of 10M documents step by step, in a
process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import numpy as np

from hsap.cli import datasets
from hsap.data.packing import Packing, PackStream, epoch_packs
from hsap.data.packing.windows import Place, Windows
from tests.bench.record import caption, conditions, record

RANKS = 8
CONTEXTS = (32768, 131072)
SPEED_DATASET = "prolong-FineWeb(2023-50)"


def main() -> None:
    """Measure and print one table of figures and one of speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer documents: seconds, and a fill that counts the rest"
    )
    parser.add_argument("--only", nargs="*", help="datasets; default all")
    arguments = parser.parse_args()
    found = conditions()
    scale = 16 if arguments.quick else 1
    names = arguments.only or [name for name in datasets.names() if name != "single"]
    print(f"{'dataset':30} {'pack':>7} {'fill %':>8} {'spread':>7} {'(best_fit)':>10} {'(fill %)':>8}")
    rows = [row(name, pack_tokens, scale) for name in names for pack_tokens in CONTEXTS]
    print(f"worst: fill {min(r['fill'] for r in rows):.4%}, weight spread {max(r['spread'] for r in rows):.4f}")
    speeds = []
    for policy in ("concat", "best_fit", "balanced"):
        with multiprocessing.get_context("spawn").Pool(1) as alone:
            speeds.append(alone.apply(speed, (policy, 10_000_000 // scale)))
        line = "{documents:,} documents by {policy}: {seconds:.1f} s, {cpu_s:.1f} s of CPU, peak {peak_mib} MiB"
        print(line.format(**speeds[-1]))
    print(caption(found))
    if not arguments.quick and not arguments.only:
        record("packing", {"rows": rows, "speeds": speeds}, found)


def row(name: str, pack_tokens: int, scale: int) -> dict:
    """Fill of best_fit and weight spread of balanced on a dataset."""
    rng = np.random.default_rng(1)
    lengths = datasets.documents(name, 1_000_000 // scale, rng)
    fill, _, fitted_spread = _figures(lengths, Packing(pack_tokens))
    # Four windows of steps say as much as hundreds.
    some = datasets.documents(name, int(512 * RANKS * pack_tokens / lengths.mean()) + 1, rng)
    balanced_fill, num_steps, spread = _figures(some, Packing(pack_tokens, "balanced"))
    print(f"{name:30} {pack_tokens:7} {fill:8.3%} {spread:7.4f} {fitted_spread:10.4f} {balanced_fill:8.3%}", flush=True)
    figures = {"fill": fill, "spread": spread, "best_fit_spread": fitted_spread, "balanced_fill": balanced_fill}
    return {"dataset": name, "pack_tokens": pack_tokens, "balanced_steps": num_steps, **figures}


def _figures(lengths: np.ndarray, packing: Packing) -> tuple[float, int, float]:
    """Fill, number of steps and mean weight spread of an epoch."""
    windows, place, tokens, weights = Windows(lengths, None, packing, RANKS, 0), Place(), 0, []
    while place.epoch == 0:
        window = windows.at(place)
        tokens += int(window.packs.tokens.sum())
        weights.append(window.packs.weights)
        place = windows.following(place, window)
    weights = np.concatenate(weights).astype(np.float64)
    assert tokens == lengths.sum()
    steps = weights[: len(weights) // RANKS * RANKS].reshape(-1, RANKS)
    spreads = steps.max(1) / steps.mean(1)
    return tokens / (len(weights) * packing.pack_tokens), len(steps), float(spreads.mean())


def speed(policy: str, num_documents: int) -> dict:
    """Seconds to give all steps of an epoch, and this process's peak memory."""
    packing = Packing(CONTEXTS[0], policy)
    epoch_packs([9], packing, 0, 0)  # what compiling takes is paid once, not once an epoch
    rng, block = np.random.default_rng(1), 1 << 16  # drawn at once, they would be the peak of memory
    lengths = np.concatenate([datasets.documents(SPEED_DATASET, block, rng) for _ in range(-(-num_documents // block))])
    lengths = lengths[:num_documents]
    whole, tokens = int(lengths.sum()), 0
    begin, cpu = time.perf_counter(), time.process_time()
    stream = PackStream(lengths, packing, RANKS)
    while tokens < whole:
        tokens += sum(stop - start for pack in next(stream).packs for _, start, stop in pack)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"policy": policy, "documents": num_documents, "seconds": seconds, "cpu_s": cpu_s, "peak_mib": peak}


if __name__ == "__main__":
    main()
