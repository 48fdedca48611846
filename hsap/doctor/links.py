"""Links: messages between all ranks, what arrives of them and how fast they are.

Ranks meet in rounds, all pairs of a round at once, until each has met each. Every one gets bytes that only its partner
would send it, and is timed with large and with small messages each way.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from hsap.calibrate.links import Links
from hsap.doctor.report import FAILED, OK, WARNING, Line

SMALL = 4 << 10
LARGE = {"cpu": 8 << 20, "cuda": 64 << 20}
EACH = 1 << 20
"""Bytes that each rank sends each other one in an all-to-all."""
TIMES = 3
SLOW = 3.0
"""A pair this many times slower than most is told of."""


def rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Pair all ranks with all others: rounds of disjoint pairs, as at a tournament."""
    places = list(range(num_ranks + num_ranks % 2))
    made = []
    for _ in range(len(places) - 1):
        pairs = list(zip(places[: len(places) // 2], places[::-1]))
        made.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_ranks])
        places = [places[0], places[-1], *places[1:-1]]
    return made if num_ranks > 1 else []


def measure_links(rank: int, device: str) -> dict[str, Any]:
    """Measure on one rank, all ranks together; JSON values.

    pairs: [partner, seconds of small and of large messages each way, whether the bytes were right] of every round that
    this rank takes part in. everybody_s: of an all-to-all.
    """
    links = Links(rank, device)
    pairs = []
    for pairs_of_round in rounds(links.num_ranks):
        mine = [pair for pair in pairs_of_round if rank in pair]
        peers = [sum(pair) - rank for pair in mine]
        right = all(_arrives(links, peer) for peer in peers)
        small_s, large_s = (links.everyone(size, TIMES, peers) for size in (SMALL, LARGE[device]))
        pairs += [[peer, small_s, large_s, right] for peer in peers]
    return {"pairs": pairs, "everybody_s": links.everybody(EACH, TIMES) if links.num_ranks > 1 else 0.0}


def _arrives(links: Links, peer: int) -> bool:
    sent, expected = (_pattern(*ends, links.device) for ends in ((links.rank, peer), (peer, links.rank)))
    got = torch.zeros_like(expected)
    links.go([(peer, sent)], [(peer, got)])
    return torch.equal(got, expected)


def _pattern(source: int, target: int, device: str) -> torch.Tensor:
    return ((torch.arange(SMALL * 16, device=device) * 7 + source * 31 + target) % 251).to(torch.uint8)


def judge_links(by_rank: Sequence[dict[str, Any]], device: str, ranks_per_node: int) -> list[Line]:
    """Judge what all ranks measured."""
    if len(by_rank) < 2:
        return [Line("P2P", OK, "one rank has nobody to talk to")]
    met: dict[tuple[int, int], tuple[float, float, bool]] = {}
    for rank, own in enumerate(by_rank):
        for peer, small_s, large_s, right in own["pairs"]:
            pair = (min(rank, peer), max(rank, peer))
            known = met.get(pair, (0.0, 0.0, True))
            met[pair] = max(known[0], small_s), max(known[1], large_s), known[2] and right
    inside = {pair: seen for pair, seen in met.items() if pair[0] // ranks_per_node == pair[1] // ranks_per_node}
    between = {pair: seen for pair, seen in met.items() if pair not in inside}
    lines = []
    for where, pairs in (("inside nodes", inside), ("between nodes", between)):
        if pairs:
            lines.append(_judged(f"P2P {where}" if inside and between else "P2P", pairs, LARGE[device]))
    seconds = max(own["everybody_s"] for own in by_rank)
    sent = EACH * (len(by_rank) - 1)
    told = f"{len(by_rank)} ranks, {EACH >> 20} MiB to each: {_rate(sent, seconds)} sent by each rank"
    return [*lines, Line("all-to-all", OK, told)]


def _judged(about: str, pairs: dict[tuple[int, int], tuple[float, float, bool]], size: int) -> Line:
    wrong = [pair for pair, (_, _, right) in pairs.items() if not right]
    if wrong:
        (one, other), count = wrong[0], f"{len(wrong)} of {len(pairs)} pairs"
        told = f"ranks {one} and {other} ({count}) received other bytes than were sent: check cables and cards, "
        return Line(about, FAILED, told + "and on GPUs try NCCL_P2P_DISABLE=1")
    times = {pair: large for pair, (_, large, _) in pairs.items()}
    slowest = max(times, key=times.__getitem__)
    usual, fastest = statistics.median(times.values()), min(times.values())
    small = statistics.median(small for small, _, _ in pairs.values())
    spread = f" to {_rate(size, fastest)}, slowest {slowest[0]}–{slowest[1]}" if len(pairs) > 1 else ""
    count = f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of ranks"
    told = (
        f"{count}, every byte right: {_rate(size, times[slowest])} each way{spread}; "
        f"{small * 1e6:.0f} µs for {SMALL >> 10} KiB"
    )
    if times[slowest] > SLOW * usual:
        return Line(
            about, WARNING, f"{told}: that pair is {times[slowest] / usual:.1f} times slower than most; check it"
        )
    return Line(about, OK, told)


def _rate(num_bytes: float, seconds: float) -> str:
    return f"{num_bytes / max(seconds, 1e-9) / 1e9:.2f} GB/s"
