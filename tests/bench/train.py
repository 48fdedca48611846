"""`python -m tests.bench.train`: training's real tokens a second, for padded batches, packs and HSAP (its Table 4).

Every method trains the tiny model with train.py's own loop on documents of the same real lengths, one step holding as
many real tokens as another's. *Batching* pads each document to the longest sequence there may be, and attends over
the padding. *Packing* fills sequences of that length; ring and Ulysses carry KV or heads around whatever the documents
are. Only documents' own tokens count; warm-up steps don't. A topology is InterSP × IntraSP: at 1x8 there is nothing
for a planner to plan but heads, and Ulysses, which takes all ranks for its heads, is the same at every topology.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hsap.cli.datasets import draw
from hsap.cli.plan import read_planner
from hsap.data.packing import Packing, PackStream
from tests.bench.record import RESULTS, caption, conditions, record
from tests.parity import REPOSITORY, run_world

NUM_RANKS = 8
TOPOLOGIES = ("1x8", "2x4", "4x2", "8x1")
DATASETS = ("fineweb", "ultrachat")
BATCHING = "batching"
VOCABULARY, SEED = 2048, 5


@dataclass(frozen=True, slots=True)
class Method:
    """A column of the table. padded: documents are padded to the sequence length instead of packed."""

    name: str
    planner: str
    padded: bool = False


METHODS = (
    Method(BATCHING, "ring", padded=True),
    Method("ring", "ring"),
    Method("ulysses", f"usp:heads={NUM_RANKS}"),
    Method("sap", "sap"),
    Method("nested", "nested"),
    Method("auto", "auto"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much to train. pack_tokens: sequence length. packs_per_step: of packing; batching has as many tokens."""

    pack_tokens: int = 4096
    packs_per_step: int = 1
    warm_steps: int = 2
    steps: int = 5


QUICK = Size(512, 1, 1, 2)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of a data set, none longer than a sequence. lengths: their real tokens, int64 [n]."""

    name: str
    lengths: np.ndarray

    @classmethod
    def of(cls, name: str, size: Size) -> Corpus:
        """Draw documents enough for every step; longer ones are cut to the sequence length."""
        wanted = (size.warm_steps + size.steps + 1) * size.packs_per_step * size.pack_tokens
        num_tokens, drawn = wanted, np.zeros(0, np.int64)
        while drawn.sum() < wanted:
            num_tokens *= 2
            drawn = np.minimum(draw(name, num_tokens, SEED)[:-1], size.pack_tokens)  # the last one is no whole document
        return cls(name, drawn[: int(np.searchsorted(np.cumsum(drawn), wanted)) + 1])

    def held(self, padded: bool, size: Size) -> np.ndarray:
        """Tokens that each document takes."""
        return np.full_like(self.lengths, size.pack_tokens) if padded else self.lengths

    def packs_per_step(self, padded: bool, size: Size) -> int:
        """Sequences of a step; padded ones as many as hold the real tokens of the packs."""
        if not padded:
            return size.packs_per_step
        return max(round(size.packs_per_step * size.pack_tokens / float(self.lengths.mean())), 1)

    def real_tokens(self, padded: bool, size: Size) -> list[tuple[int, int]]:
        """(real tokens, capacity in tokens) of each step, as the loader deals documents out."""
        count = self.packs_per_step(padded, size)
        stream = PackStream(self.held(padded, size), Packing(size.pack_tokens), count, SEED)
        out = []
        for _ in range(size.warm_steps + size.steps):
            pieces = [piece for pack in next(stream).packs for piece in pack]
            real = sum(self.lengths[piece.document] if padded else piece.num_tokens for piece in pieces)
            out.append((int(real), count * size.pack_tokens))
        return out

    def write(self, padded: bool, size: Size, folder: Path) -> Path:
        """Write the documents as token ids, padding included."""
        random = np.random.default_rng(SEED)
        path = folder / f"{self.name}-{'padded' if padded else 'plain'}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for i, (length, held) in enumerate(zip(self.lengths.tolist(), self.held(padded, size).tolist())):
                tokens = random.integers(2, VOCABULARY, length).tolist() + [0] * (held - length)
                file.write(json.dumps({"id": str(i), "tokens": tokens}) + "\n")
        return path


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Print a table for every data set and keep the figures."""
    asked = _parser().parse_args(argv)
    found = conditions()
    size = QUICK if asked.quick else Size()
    topologies = asked.topology or (TOPOLOGIES[-1:] if asked.quick else TOPOLOGIES)
    print(
        f"train: {caption(found, ranks=NUM_RANKS, threads_per_rank=1)}; tiny model, sequences of {size.pack_tokens} "
        f"tokens, packs a step: {size.packs_per_step}, {size.steps} steps after {size.warm_steps}\nreal tokens/s, "
        "in brackets over batching's. waste: share of what is computed (padding), and of sequences left open (packs)."
    )
    rows = []
    for name in asked.dataset or (DATASETS[:1] if asked.quick else DATASETS):
        rows += measure(Corpus.of(name, size), size, topologies, METHODS)
    record("train", {"quick": asked.quick, "ranks": NUM_RANKS, "rows": rows}, found, folder)


def measure(corpus: Corpus, size: Size, topologies: Sequence[str], methods: Sequence[Method]) -> list[dict]:
    """Train every method at every topology, in one world of ranks, and print a row for each topology."""
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        cases = [(topology, method) for topology in topologies for method in methods]
        outs = [Path(folder) / str(i) for i in range(len(cases))]
        runs = [
            _arguments(corpus, size, topology, method, Path(folder), out)
            for (topology, method), out in zip(cases, outs)
        ]
        inter, intra = topologies[0].split("x")
        run_world(int(inter) * int(intra), runs, Path(folder))
        figures = {case: _figures(corpus, size, case[1], out) for case, out in zip(cases, outs)}
    print(
        f"\n{corpus.name}: documents of {corpus.lengths.mean():.0f} tokens (median {np.median(corpus.lengths):.0f}, "
        f"longest {corpus.lengths.max()}); waste: {_wastes(figures)}\n{'topology':<10}"
        + "".join(f"{method.name:>18}" for method in methods)
    )
    rows = []
    for topology in topologies:
        mine = {method.name: figures[topology, method] for method in methods}
        rows.append({"dataset": corpus.name, "pack_tokens": size.pack_tokens, "topology": topology, "methods": mine})
        print(f"{topology:<10}" + "".join(f"{_cell(one, mine):>18}" for one in mine.values()), flush=True)
    return rows


def _figures(corpus: Corpus, size: Size, method: Method, out: Path) -> dict:
    """Real tokens over the time of the steps after the warm-up."""
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    real = corpus.real_tokens(method.padded, size)
    assert len(steps) == len(real) == size.warm_steps + size.steps
    for step, (tokens, capacity) in zip(steps, real):
        assert step["tokens"] == (capacity if method.padded else tokens), "the loader deals as the stream does"
    kept = slice(size.warm_steps, None)
    tokens, capacity = (sum(column) for column in zip(*real[kept]))
    seconds = sum(step["step_s"] for step in steps[kept])
    return {
        "tokens_per_s": tokens / seconds,
        "real_tokens": tokens,
        "waste": 1 - tokens / capacity,
        "step_s": seconds / size.steps,
        "wait_s": sum(step["plan_wait_s"] + step["data_wait_s"] for step in steps[kept]) / size.steps,
        "planners": steps[-1]["planners"],
    }


def _arguments(corpus: Corpus, size: Size, topology: str, method: Method, folder: Path, out: Path) -> list[str]:
    """What train.py is told."""
    name, options = read_planner(method.planner)
    settings = {
        "+topology": topology,
        "planner": name,
        **{f"planner.{key}": value for key, value in options.items()},
        "data.path": corpus.write(method.padded, size, folder),
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.pack_tokens": size.pack_tokens,
        "train.seed": SEED,
        "train.steps": size.warm_steps + size.steps,
        "train.packs_per_step": corpus.packs_per_step(method.padded, size),
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "out": out,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def _wastes(figures: dict[tuple[str, Method], dict]) -> str:
    kinds = {("batching" if method.padded else "packing"): told["waste"] for (_, method), told in figures.items()}
    return ", ".join(f"{kind} {waste:.1%}" for kind, waste in kinds.items())


def _cell(one: dict, row: dict[str, dict]) -> str:
    base = row.get(BATCHING)
    over = f" ({one['tokens_per_s'] / base['tokens_per_s']:.2f}×)" if base else ""
    return f"{one['tokens_per_s']:.0f}{over}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.train", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one data set at 8x1, short sequences, two steps")
    parser.add_argument("--dataset", nargs="+", metavar="NAME", help=f"of datasets/lengths (default {DATASETS})")
    parser.add_argument("--topology", nargs="+", choices=TOPOLOGIES, help="default: all")
    return parser


if __name__ == "__main__":
    main()
