"""`python -m tests.bench.memory`: allocations of real training runs, counted, beside what the memory model says.

Ranks train a step and then another, whose peak is compared (the first one makes the optimizer's state). Counted is what
PyTorch's CPU allocator was asked for, on the fullest rank; what gloo, NumPy and Python take beside is not. Each row is
a topology, ZeRO stage, number format, checkpointing, shape and length of pack.

For a quiet machine: where cores are short, gloo's thread may let go of a reduced bucket only after the next one is
there, and the count is then higher by that bucket, in one run and not in the next.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hsap.cli.datasets import draw
from hsap.ir.problem import Topology
from hsap.models.config import ModelConfig
from hsap.tune.memory import kept_copies, phases
from hsap.tune.setting import Setting
from tests.bench.record import RESULTS, caption, conditions, record
from tests.pairwise import pairwise
from tests.parity import REPOSITORY, run_world

PHASES = ("forward", "backward", "update")
SCRIPT = Path(__file__).with_name("allocations.py")
BAR = 0.10
SEED = 5

SHAPES = {
    "tiny": {"vocab_size": 2048, "num_layers": 4, "hidden_dim": 128, "num_q_heads": 8, "num_kv_heads": 4,
             "head_dim": 16, "ffn_dim": 352, "tied_embeddings": True},
    "wide": {"vocab_size": 3072, "num_layers": 2, "hidden_dim": 256, "num_q_heads": 4, "num_kv_heads": 1,
             "head_dim": 64, "ffn_dim": 1024, "tied_embeddings": False},
    "deep": {"vocab_size": 3072, "num_layers": 8, "hidden_dim": 192, "num_q_heads": 6, "num_kv_heads": 2,
             "head_dim": 32, "ffn_dim": 512, "tied_embeddings": True},
    "large": {"vocab_size": 2048, "num_layers": 6, "hidden_dim": 384, "num_q_heads": 6, "num_kv_heads": 3,
              "head_dim": 64, "ffn_dim": 1024, "tied_embeddings": False},
    "odd": {"vocab_size": 2500, "num_layers": 5, "hidden_dim": 160, "num_q_heads": 5, "num_kv_heads": 5,
            "head_dim": 32, "ffn_dim": 300, "tied_embeddings": True, "attention_bias": "qkv", "qk_norm": True},
}  # fmt: skip
TOPOLOGIES = ("1x1", "2x1", "1x2", "2x2", "4x1")
DTYPES = ("fp32", "bf16")
CHECKPOINTING = ("none", "selective", "full")
LENGTHS = (96, 384)
LOSS_CHUNK = 128
ACCUMULATION = (1, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. pack_tokens: of a pack, one a micro-step. options: more keys of train.py."""

    shape: str
    topology: str
    zero_stage: int
    dtype: str
    checkpointing: str
    pack_tokens: int
    accumulation: int
    options: tuple[tuple[str, object], ...] = field(default=())

    @property
    def num_ranks(self) -> int:
        return Topology.parse(self.topology).num_ranks

    @property
    def model(self) -> ModelConfig:
        changed = {key.removeprefix("model."): value for key, value in self.options if key.startswith("model.")}
        settled = {"checkpointing": self.checkpointing, "loss_chunk_tokens": LOSS_CHUNK}
        return ModelConfig(**SHAPES[self.shape] | settled | changed)

    @property
    def setting(self) -> Setting:
        return Setting(1, Topology.parse(self.topology), "sap", self.zero_stage, self.checkpointing, 1,
                       self.accumulation, self.dtype)  # fmt: skip

    @property
    def name(self) -> str:
        """Name of the folder of its counts."""
        own = [f"{key.removeprefix('model.')}-{value}" for key, value in self.options]
        parts = (self.shape, self.topology, f"zero{self.zero_stage}", self.dtype, self.checkpointing, self.pack_tokens)
        return "-".join(map(str, (*parts, self.accumulation, *own)))

    def predicted(self, tokens: int, arena: int) -> dict[str, dict[str, float]]:
        """What the model says of each phase, by item."""
        return phases(self.model, self.setting, tokens, arena, 0.0, kept_copies(self.model, self.setting))


def cases(quick: bool) -> list[Case]:
    """Rows in which any two choices of two columns meet."""
    if quick:
        return [Case("tiny", "2x1", zero, dtype, "none", 512, 1) for zero in (0, 3) for dtype in DTYPES]
    columns = (("tiny", "wide", "deep"), TOPOLOGIES, (0, 1, 2, 3), DTYPES, CHECKPOINTING, LENGTHS, ACCUMULATION)
    rows = [tuple(column[i] for column, i in zip(columns, row)) for row in pairwise(*map(len, columns))]
    # Stage by number format is what buffers and gradients hang on: all of them, on two ranks; "large" is larger than a
    # bucket.
    rows += [(shape, "2x1", zero, dtype, "none", length, 1) for zero in (0, 1, 2, 3) for dtype in DTYPES
             for shape, length in (("tiny", 768), ("wide", 96), ("large", 64))]  # fmt: skip
    chunked = (("model.mlp_chunk_tokens", 64), ("model.loss_chunk_vocab", 512))
    more = [Case("wide", "2x1", zero, dtype, how, 384, 1, chunked) for zero, dtype, how in
            ((1, "fp32", "none"), (3, "bf16", "full"), (0, "fp32", "selective"))]  # fmt: skip
    more += [
        Case("odd", topology, zero, dtype, how, 600, accumulation)
        for topology, zero, dtype, how, accumulation in (
            ("3x1", 0, "fp32", "full", 1), ("1x3", 1, "bf16", "selective", 2), ("3x1", 2, "bf16", "none", 1),
            ("1x3", 3, "fp32", "selective", 1), ("3x1", 3, "bf16", "full", 2), ("1x3", 1, "fp32", "none", 1),
        )
    ]  # fmt: skip
    return [Case(*row) for row in dict.fromkeys(rows)] + more


def drawn(count: int) -> list[Case]:
    """Rows of shapes and settings drawn at random, on which the model of memory was never mended."""
    random, rows = np.random.default_rng(SEED), []
    for _ in range(count):
        pick = lambda *choices: choices[random.integers(len(choices))]  # noqa: E731
        kv, group, head_dim = pick(1, 2, 3), pick(1, 2, 4), pick(16, 32, 48)
        shape = {
            "vocab_size": int(random.integers(2048, 5000)), "num_layers": pick(1, 3, 5, 9),
            "hidden_dim": 8 * int(random.integers(10, 60)), "num_q_heads": kv * group, "num_kv_heads": kv,
            "head_dim": head_dim, "ffn_dim": int(random.integers(100, 1200)), "loss_chunk_tokens": pick(50, 128, 1000),
            "mlp_chunk_tokens": pick(None, None, 100), "loss_chunk_vocab": pick(None, None, 700),
        }  # fmt: skip
        options = tuple((f"model.{key}", value) for key, value in shape.items() if value is not None)
        topology = pick("1x1", "2x1", "3x1") if kv * group < 2 else pick("2x1", "1x2", "3x1")
        rows.append(Case(pick("tiny", "wide"), topology, pick(0, 1, 2, 3), pick(*DTYPES), pick(*CHECKPOINTING),
                         int(random.integers(60, 900)), pick(1, 2, 3), options))  # fmt: skip
    return rows


LONG_PACKS = {"1x1": (8, 16, 32, 64, 128), "2x1": (8, 32, 128), "2x2": (8, 64, 128), "4x2": (8, 128)}
"""Lengths in Ki tokens by topology: the shortest and the longest of all, and those of 16 Ki tokens a rank."""
DATASET = "fineweb"
LONG = (("data.packing", "concat"), ("model.loss_chunk_tokens", 256))


def long_packs(wanted: dict[str, Sequence[int]], keep: Path | None = None) -> list[dict]:
    """Activations' peak of forward and backward on the fullest rank. wanted: lengths of pack in Ki tokens, by topology.

    The tiny model trains one step on packs filled with documents of a dataset's lengths, the last one cut. Activations
    are what the peak is above what was there before: state and arena (24 times the fullest rank's q) aren't in it.
    """
    found: dict[tuple[int, str], dict] = {}
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as made:
        root = keep or Path(made)
        root.mkdir(parents=True, exist_ok=True)
        data = write_documents(root, draw(DATASET, 2048 * max(map(max, wanted.values())), SEED))
        for topology, lengths in wanted.items():
            mine = [Case("tiny", topology, 1, "fp32", "none", length << 10, 1, LONG) for length in lengths]
            outs = [root / f"{topology}-{case.pack_tokens}" for case in mine]
            _train([arguments(case, out, data, steps=1) for case, out in zip(mine, outs)], outs, mine[0].num_ranks)
            for length, out in zip(lengths, outs):
                found[length, topology] = _activations(out) | {"pack_tokens": length << 10, "topology": topology}
    print(
        f"MiB of activations on the fullest rank, one pack of documents of {DATASET}'s lengths\n{'tokens':<10}"
        + "".join(f"{topology:>12}" for topology in wanted)
    )
    for length in sorted({length for length, _ in found}):
        cells = [found.get((length, topology)) for topology in wanted]
        told = [f"{one['activation_bytes'] / 2**20:.1f}" if one else "" for one in cells]
        print(f"{f'{length}K':<10}" + "".join(f"{cell:>12}" for cell in told))
    return list(found.values())


def counts(out: Path) -> list[dict]:
    """What each rank of a run counted, see `allocations`."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("allocated-*.json"))]


def fullest(ranks: list[dict]) -> tuple[dict, str, dict]:
    """The rank with the highest peak, the phase that has it, and what was counted there."""
    told = max(ranks, key=lambda rank: max(phase["bytes"] for phase in rank["phases"].values()))
    return told, *max(told["phases"].items(), key=lambda item: item[1]["bytes"])


def _activations(out: Path) -> dict:
    """Of a run's fullest rank: bytes above what was there before its forward, tokens, and the arena."""
    ranks = counts(out)
    peaks = [max(rank["phases"][name]["bytes"] for name in PHASES[:2]) - rank["before"] for rank in ranks]
    return {
        "activation_bytes": max(peaks),
        "tokens": max(rank["tokens"] for rank in ranks),
        "arena_bytes": max(rank["arena"] for rank in ranks),
    }


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Print the table and keep the figures."""
    asked = _parser().parse_args(argv)
    found = conditions()
    print(f"memory: {caption(found, threads_per_rank=1)}\n")
    if asked.long:
        rows = long_packs(LONG_PACKS, asked.keep)
        record("memory", {"long": True, "rows": rows}, found, folder)
        return
    rows = measure(drawn(asked.drawn) if asked.drawn else cases(asked.quick), asked.keep)
    off = [abs(row["predicted_bytes"] / row["counted_bytes"] - 1) for row in rows]
    print(f"\n{len(rows)} rows: off by {np.median(off):.1%} in the median, by {max(off):.1%} at most (bar {BAR:.0%})")
    off = [abs(b / a - 1) for row in rows for a, b in row["phases"].values()]
    print(f"forward, backward and update by themselves: {np.median(off):.1%} and {max(off):.1%}")
    record("memory", {"quick": asked.quick, "drawn": asked.drawn, "rows": rows}, found, folder)


def measure(wanted: Sequence[Case], keep: Path | None = None) -> list[dict]:
    """Train every case, those of a number of ranks in one world, and print a row for each."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as made:
        root = keep or Path(made)
        root.mkdir(parents=True, exist_ok=True)
        data = write_documents(root)
        print(f"{'shape':<6}{'topology':>9}{'ZeRO':>5}{'dtype':>6}{'ckpt':>11}{'pack':>7}{'acc':>4}{'counted':>10}"
              f"{'model':>10}{'':>7}  at its peak")  # fmt: skip
        for num_ranks in sorted({case.num_ranks for case in wanted}):
            mine = [case for case in wanted if case.num_ranks == num_ranks]
            outs = [root / case.name for case in mine]
            _train([arguments(*each, data) for each in zip(mine, outs)], outs, num_ranks)
            rows += [row(case, out) for case, out in zip(mine, outs)]
    return rows


def _train(runs: list[list[str]], outs: list[Path], num_ranks: int) -> None:
    """Train, in one world, what hasn't been counted yet."""
    runs = [run for run, out in zip(runs, outs) if not (out / "allocated-0.json").exists()]
    if runs:
        run_world(num_ranks, runs, outs[0].parent, SCRIPT)


def row(case: Case, out: Path) -> dict:
    """Compare a run's fullest rank with the model, and print it."""
    ranks = counts(out)
    told, phase, most = fullest(ranks)
    each = case.predicted(max(rank["tokens"] for rank in ranks), told["arena"])
    items = max(each.values(), key=lambda items: sum(items.values()))
    counted, predicted = most["bytes"], sum(items.values())
    ratio = predicted / counted - 1
    sums = {name: sum(items.values()) for name, items in each.items()}
    between = max(sums[name] for name in sums.keys() - {"loss", "update"})
    by_phase = dict(zip(PHASES, (sums["loss"], between, sums["update"])))
    largest = max(items, key=items.__getitem__)
    print(f"{case.shape:<6}{case.topology:>9}{case.zero_stage:>5}{case.dtype:>6}{case.checkpointing:>11}"
          f"{case.pack_tokens:>7}{case.accumulation:>4}{counted / 2**20:>10.2f}{predicted / 2**20:>10.2f}{ratio:>7.1%}"
          f"  {phase}, {largest}", flush=True)  # fmt: skip
    return {
        "shape": case.shape, "topology": case.topology, "zero_stage": case.zero_stage, "dtype": case.dtype,
        "checkpointing": case.checkpointing, "pack_tokens": case.pack_tokens, "accumulation": case.accumulation,
        "options": dict(case.options), "counted_bytes": counted, "predicted_bytes": round(predicted), "phase": phase,
        "phases": {name: (told["phases"][name]["bytes"], round(by_phase[name])) for name in by_phase},
        "counted": most["parts"], "predicted": {key: round(value) for key, value in items.items()},
    }  # fmt: skip


def write_documents(folder: Path, lengths: Sequence[int] | None = None) -> Path:
    """Write documents as ids. lengths: in tokens; None: 400 documents of up to 400."""
    random = np.random.default_rng(SEED)
    path = folder / "documents.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i, length in enumerate(random.integers(40, 400, 400).tolist() if lengths is None else lengths):
            tokens = random.integers(2, 1500, length).tolist()
            file.write(json.dumps({"id": str(i), "tokens": tokens}) + "\n")
    return path


def arguments(case: Case, out: Path, data: Path, steps: int = 2) -> list[str]:
    """What train.py is told."""
    settings = {
        "+topology": case.topology,
        "data.path": data,
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.cache": data.parent / "cache",
        "data.pack_tokens": case.pack_tokens,
        "train.seed": SEED,
        "train.steps": steps,
        "train.packs_per_step": case.accumulation,
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "engine.zero_stage": case.zero_stage,
        "engine.dtype": case.dtype,
        **{f"model.{key}": value for key, value in SHAPES[case.shape].items()},
        "model.checkpointing": case.checkpointing,
        "model.loss_chunk_tokens": LOSS_CHUNK,
        **dict(case.options),
        "out": out,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model on two ranks, four rows")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="N rows of random shapes and settings instead"
    )
    parser.add_argument("--long", action="store_true", help="activations of packs of 8K to 128K tokens on 1 to 8 ranks")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep counts there, and use those that are there")
    return parser


if __name__ == "__main__":
    main()
