"""Flags that say what to plan: the batch, its masks and heads, and the ranks to run on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hsap import clusters
from hsap.cli import datasets
from hsap.ir.check import MAX_TOKENS, shown, whole
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import parse_masks
from hsap.ir.problem import Cluster, Problem, Topology

CLUSTERS = f"{', '.join(clusters.names())}, or a file like theirs"
"""What --cluster takes, for the help of commands."""


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags that `problems` reads."""
    lengths = command.add_mutually_exclusive_group(required=True)
    lengths.add_argument("--lengths", metavar="N,N,…", help="document lengths in tokens")
    lengths.add_argument("--lengths-file", metavar="F.json", help="a batch, or a list of batches")
    lengths.add_argument("--dataset", metavar="NAME", help="draw a pack of --tokens from a dataset's document lengths")
    command.add_argument("--tokens", type=int, metavar="N", help="size of the pack drawn from --dataset")
    command.add_argument("--seed", type=int, metavar="S", help="of the pack drawn from --dataset (default 0)")
    command.add_argument("--sequences", type=int, default=1, metavar="B", help="copies of the batch side by side")
    command.add_argument("--topology", default="4x1", metavar="NxM", help="InterSP × IntraSP (default 4x1)")
    command.add_argument("--heads", default="8:2:128", metavar="Q:KV:DIM", help="default 8:2:128")
    command.add_argument("--dtype", default="bf16", help="of q, k, v (default bf16)")
    command.add_argument(
        "--mask",
        default="causal",
        metavar="NAME[:p,…][*LAYERS][+…]",
        help="of every document; several masks for so many layers each, as in window:4096*5+causal (default causal)",
    )
    command.add_argument("--cluster", metavar="NAME|FILE.yaml", help=f"{CLUSTERS} (default: nodes of 8)")
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="default: the cluster's, 8")
    command.add_argument("--max-tokens-per-rank", type=int, metavar="N", help="refuse plans that give a rank more")


def problems(arguments: argparse.Namespace) -> tuple[Callable[[Layout], Problem], list[Layout], bool]:
    """Read the flags: how a batch becomes a problem, the batches, and whether they came as a list of batches.

    ValueError: one paragraph that names the flag.
    """
    layouts, is_list = _layouts(arguments)
    copies = whole("--sequences", arguments.sequences)
    layouts = [_repeated(layout, copies) for layout in layouts]
    heads = named("--heads, --dtype", HeadShape.parse, arguments.heads, arguments.dtype)
    topology = named("--topology", Topology.parse, arguments.topology)
    masks, cluster = named("--mask", parse_masks, arguments.mask), _cluster(arguments)
    limit = arguments.max_tokens_per_rank
    if limit is not None:
        whole("--max-tokens-per-rank: max_tokens_per_rank", limit)
    return lambda layout: Problem(layout, heads, topology, masks, cluster, limit), layouts, is_list


def _cluster(arguments: argparse.Namespace) -> Cluster:
    cluster = named("--cluster", clusters.read, arguments.cluster) if arguments.cluster is not None else Cluster()
    if arguments.ranks_per_node is None:
        return cluster
    return named("--ranks-per-node", cluster.starting_at, cluster.first_rank, arguments.ranks_per_node)


def _repeated(layout: Layout, copies: int) -> Layout:
    if max(layout.num_tokens, len(layout.sequences)) * copies > MAX_TOKENS:
        raise ValueError(
            f"--sequences {copies}: so many copies of {layout.num_tokens} tokens are more than the {MAX_TOKENS} that a "
            "packed batch may have; lay fewer side by side"
        )
    return Layout(layout.lengths * copies, layout.sequences * copies)


def _layouts(arguments: argparse.Namespace) -> tuple[list[Layout], bool]:
    """Read the batches, and whether they came as a list of batches."""
    if arguments.dataset is not None:
        if arguments.tokens is None:
            raise ValueError("--dataset: the size of the pack is missing; give --tokens N")
        drawn = datasets.draw(arguments.dataset, arguments.tokens, arguments.seed or 0)
        return [_layout(drawn, "--dataset")], False
    for flag in ("tokens", "seed"):
        if getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag}: it says how to draw from a dataset; give --dataset NAME too, or leave it out")
    if arguments.lengths is not None:
        words = [word for word in arguments.lengths.split(",") if word.strip()]
        if bad := [word for word in words if not word.strip().isdecimal()]:
            raise ValueError(f"--lengths: {shown(bad[0])} is no number of tokens; write 3000,1200,50000")
        return [_layout(named("--lengths", lambda: [int(word) for word in words]), "--lengths")], False
    return read_batches(arguments.lengths_file, "--lengths-file")


def read_batches(file: str, flag: str) -> tuple[list[Layout], bool]:
    """Read a file of document lengths: the batches, and whether they came as a list of batches."""
    path = f"{flag} {file}"
    try:
        # Some editors begin a file with a mark of its encoding; YAML's reader knows it too.
        data = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; check the path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if isinstance(data, list) and any(isinstance(batch, list | dict) for batch in data):
        return [_layout(batch, f"{path}, batch {i}") for i, batch in enumerate(data)], True
    return [_layout(data, path)], False


def _layout(batch: object, where: str) -> Layout:
    packs = batch.get("sequences") if isinstance(batch, dict) else [batch]
    if not isinstance(packs, list) or not all(
        isinstance(pack, list) and all(type(n) is int for n in pack) for pack in packs
    ):
        raise ValueError(f'{where}: a batch is a list of document lengths or {{"sequences": [[…], […]]}}, all integers')
    lengths, sequences = [n for pack in packs for n in pack], [len(pack) for pack in packs]
    return named(where, Layout.from_lengths, lengths, sequences)


def named(flag: str, read: Callable[..., Any], *values: Any) -> Any:
    """Read values; a complaint about them begins with the flag."""
    try:
        return read(*values)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
