"""`hsap tune`: which way of running a model on a cluster fits, and how fast, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsap import clusters
from hsap.cli import datasets, settings
from hsap.cli.exit import OK
from hsap.cli.problem import CLUSTERS, named, read_batches
from hsap.ir.check import MAX_TOKENS, Refused, one_of, shown, whole
from hsap.ir.cluster import BOUNDLESS, Cluster

if TYPE_CHECKING:
    from hsap.models.config import ModelConfig
    from hsap.tune.job import Job

PROJECT = Path(__file__).resolve().parents[2]
"""The checkout, with train.py and configs; of an installed package, where neither is."""
MODELS = clusters.FOLDER.parent / "model"
HOST_RANKS = 8
"""Ranks of a host that doesn't say how many it runs."""
GLOBAL_TOKENS = 1 << 22
MEASURED = 3


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "tune",
        help="rank the ways of running a model on a cluster, and write the best down",
        description="Rank the ways of running a model on a cluster by simulated step time, with the memory of the "
        "fullest rank, and say what doesn't fit. Takes minutes.",
    )
    command.add_argument("--model", required=True, metavar="NAME", help="a file of configs/model")
    command.add_argument(
        "--data",
        default="ldc",
        metavar="DIR|F.json|DATASET",
        help="document lengths: of data in a folder of hsap prepare; of a file, in tokens, as in [3000, 1200]; or "
        "drawn from a dataset's (default ldc)",
    )
    command.add_argument("--cluster", required=True, metavar="NAME|FILE.yaml", help=CLUSTERS)
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="default 1")
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="default: the cluster's")
    command.add_argument("--seq-len", type=int, default=4096, metavar="L", help="tokens of a pack (default 4096)")
    command.add_argument(
        "--global-batch-tokens", type=int, metavar="N", help="of an optimizer step (default 4Mi, at least one pack)"
    )
    command.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16, fp32 on CPUs")
    command.add_argument(
        "--seed", type=int, default=settings.SEED, metavar="S", help=f"train.seed, of packs (default {settings.SEED})"
    )
    command.add_argument("--planners", metavar="A,B,…", help="planners to try (default: the fast ones)")
    command.add_argument("--top", type=int, default=10, metavar="K", help="rows of the table (default 10)")
    command.add_argument("-o", "--out", metavar="NAME", help="write the best as configs/experiment/NAME.yaml")
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    command.add_argument(
        "--measure", action="store_true", help=f"train the best {MEASURED} for a few steps on this machine, too"
    )
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for --measure: overrides of train.py")
    command.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    # The search brings numba, which takes longer to import than all else that a command needs.
    from hsap.planners import usual
    from hsap.tune import experiment, search, table, trials

    if arguments.out is not None:
        _needs(PROJECT / "configs" / "experiment", f"-o {arguments.out}", "writes to it", "take figures from --json")
        named("-o", experiment.path_of, PROJECT / "configs", arguments.out)
    if arguments.overrides and not arguments.measure:
        raise Refused(f"{arguments.overrides[0]}: settings of train.py are for --measure; add it, or leave them out")
    if arguments.measure:
        _needs(PROJECT / "train.py", "--measure", "runs it", "leave it out")
    job, top = _job(arguments), whole("--top", arguments.top)
    if arguments.measure:
        named("--measure, --nodes", trials.check_measurable, job)
    planners = None
    if arguments.planners is not None:
        planners = named("--planners", usual, [name.strip() for name in arguments.planners.split(",")])
    found = named("--model, --cluster, --nodes, --seq-len", search.tune, job, planners, top)
    measured: dict[int, trials.Measured] | None = None
    if arguments.measure:
        measured = {}
        for i, row in enumerate(found.rows[:MEASURED]):
            if sys.stderr.isatty():
                print(f"hsap tune: trial {i + 1} of {min(MEASURED, len(found.rows))}", file=sys.stderr, flush=True)
            measured[i] = trials.measure(PROJECT, job, row, arguments.overrides)
    print(json.dumps(table.figures(found, measured)) if arguments.json else table.text(found, measured))
    if arguments.out is not None:
        path = experiment.write(PROJECT / "configs", arguments.out, job, found.rows[0])
        if not arguments.json:
            print(f"\nThe first row is {path}: train.py +experiment={path.stem}")
    return OK


def _needs(path: Path, option: str, why: str, instead: str) -> None:
    """Refuse what only a checkout has the files for, before anything takes long."""
    if not path.exists():
        raise Refused(
            f"{option}: there is no {path}, and this {why}; it comes with the source tree, so install from there (pip "
            f"install -e .), or {instead}"
        )


def read_cluster(arguments: argparse.Namespace) -> Cluster:
    """Give the machines that --cluster, --nodes and --ranks-per-node name."""
    cluster = named("--cluster", clusters.read, arguments.cluster, whole("--nodes", arguments.nodes))
    per_node = arguments.ranks_per_node
    if per_node is None and cluster.ranks_per_node >= BOUNDLESS:
        # A rank a core, where the host says how many those are.
        cores = BOUNDLESS if cluster.cores is None else cluster.cores
        per_node = HOST_RANKS if cores >= BOUNDLESS else max(int(cores), 1)
    return cluster.starting_at(0, None if per_node is None else whole("--ranks-per-node", per_node))


def _job(arguments: argparse.Namespace) -> Job:
    from hsap.tune import trials
    from hsap.tune.job import Job, packs_per_step

    cluster = read_cluster(arguments)
    seq_len = whole("--seq-len", arguments.seq_len, 1, MAX_TOKENS)
    tokens = max(GLOBAL_TOKENS, seq_len) if arguments.global_batch_tokens is None else arguments.global_batch_tokens
    packs = named("--global-batch-tokens, --seq-len", packs_per_step, whole("--global-batch-tokens", tokens), seq_len)
    dtype = arguments.dtype or ("fp32" if cluster.is_host else "bf16")
    # A trial's corpus is written to a file, and every rank reads it.
    drawn = min((trials.STEPS + 1) * packs * seq_len, MAX_TOKENS) if arguments.measure else MAX_TOKENS
    seed = whole("--seed", arguments.seed, 0, datasets.MAX_SEED)
    lengths = read_lengths(arguments.data, drawn, seed)
    shape = read_model(arguments.model)
    return named(
        "--nodes, --ranks-per-node", Job, arguments.model, shape, cluster, lengths, seq_len, packs, dtype, seed
    )


def read_model(name: str) -> ModelConfig:
    """Read a model's shape from configs/model; a vocabulary left open is the demo tokenizer's."""
    from hsap.models.config import ModelConfig

    # The file of that name has no shape of its own, but that of the folder that a run names.
    known = sorted(path.stem for path in MODELS.glob("*.yaml") if path.stem != "huggingface")
    one_of("--model: unknown name", name, known, "models")
    path = MODELS / f"{name}.yaml"
    values = clusters.load_yaml(path, f"--model {name}")
    if not isinstance(values, dict):
        raise Refused(f"--model {name}: {path} holds {shown(values)}; give a model's fields, a line each")
    if values.get("vocab_size") is None:
        from hsap.data.tokenizer import load_tokenizer

        tokenizer = PROJECT / "datasets" / "demo" / "tokenizer.json"
        _needs(tokenizer, f"--model {name}", "takes its vocabulary from it", "choose another model")
        values["vocab_size"] = load_tokenizer(str(tokenizer)).vocab_size
    return ModelConfig.from_mapping(values)


def read_lengths(data: str, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Document lengths of a file's batches, or drawn from a dataset."""
    if data in datasets.names():
        return tuple(datasets.draw(data, num_tokens, seed))
    if Path(data).is_dir():
        return _prepared_lengths(data, num_tokens, seed)
    if not data.endswith(".json"):
        one_of(
            "--data: neither a folder of hsap prepare, a file F.json nor the name of a dataset:",
            data,
            datasets.names(),
            "datasets",
        )
    layouts = read_batches(data, "--data")[0]
    lengths = tuple(length for layout in layouts for length in layout.lengths)
    if not lengths:
        raise ValueError(f"--data {data}: there is no document in it; give lengths in tokens, as in [3000, 1200]")
    return lengths


def _prepared_lengths(folder: str, num_tokens: int, seed: int) -> tuple[int, ...]:
    """Document lengths of prepared data, in an order that the seed draws, until there are so many tokens."""
    import numpy as np

    from hsap.data import prepared

    lengths = named("--data", prepared.open_store, folder).lengths
    lengths = np.random.default_rng(seed).permutation(lengths[lengths > 0])
    drawn = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens, side="right"))]
    # One that is longer than all that is asked for is there all the same.
    return tuple((drawn if len(drawn) else np.minimum(lengths[:1], num_tokens)).tolist())
