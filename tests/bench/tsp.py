"""`python -m tests.bench.tsp`: memory of a rank under TSP, SP, ZeRO 3 and TP, counted and by the model.

Every row trains the same model on the same packs; counted is what PyTorch's CPU allocator was asked for on the fullest
rank in a second step (`tests.bench.allocations`). TP is by the model alone, because nothing here runs it. Below that,
the model's figures for the case that TSP's paper publishes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from hsap.ir.problem import Topology
from hsap.models.config import ModelConfig
from hsap.tune.memory import kept_copies, rank_bytes
from hsap.tune.setting import Setting
from tests.bench.memory import SCRIPT, Case, arguments, counts, fullest, write_documents
from tests.bench.record import RESULTS, caption, conditions, record
from tests.bench.tsp_memory import tp_bytes, tsp_bytes
from tests.parity import run_world

TSP = (("parallel", "tsp"), ("tsp_axis", "all"), ("planner", "zigzag"))
PUBLISHED = {"TSP": 38.8e9, "TP": 70.0e9}
PAPER = {"vocab_size": 32_000, "num_layers": 32, "hidden_dim": 4096, "num_q_heads": 32, "num_kv_heads": 32,
         "head_dim": 128, "tied_embeddings": False}  # fmt: skip
PAPER_TOKENS, PAPER_DEGREE = 1 << 17, 8
WIDTHS = {"FFN 4 h, gated (8.9e9 parameters)": 16_384, "FFN 8/3 h, gated (as many weights as 4 h without gate)": 10_923}


def cases(quick: bool) -> list[Case]:
    """TSP of degree 2 and 4, and beside each what else the same ranks can do."""
    shapes, dtypes = (("wide",), ("fp32",)) if quick else (("wide", "large"), ("fp32", "bf16"))
    made = []
    for shape in shapes:
        for dtype in dtypes:
            for topology in ("2x1",) if quick else ("2x1", "4x1"):
                tokens = 128 if shape == "large" else 768
                one = Case(shape, topology, 1, dtype, "none", tokens, 1)
                made += [replace(one, options=TSP), one, replace(one, zero_stage=3)]
    return made


def kind(case: Case) -> str:
    """What a row is called."""
    return "TSP" if case.options else ("ZeRO 3" if case.zero_stage == 3 else "SP, ZeRO 1")


def predicted(case: Case, tokens: int, arena: int) -> dict[str, float]:
    """What the model says, by item."""
    if case.options:
        return tsp_bytes(case.model, case.setting, case.num_ranks, tokens, arena)
    return rank_bytes(case.model, case.setting, tokens, arena, 0.0, kept_copies(case.model, case.setting))


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Print both tables and keep the figures."""
    parser = argparse.ArgumentParser("tests.bench.tsp", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape on two ranks")
    quick = parser.parse_args(argv).quick
    found = conditions()
    print(f"tsp: {caption(found, threads_per_rank=1)}\n")
    rows = measure(cases(quick))
    record("tsp", {"quick": quick, "rows": rows, "published": paper()}, found, folder)


def measure(wanted: list[Case]) -> list[dict]:
    """Train every case and print a row for each, with TP's beside it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-tsp-") as made:
        root = Path(made)
        data = write_documents(root)
        print(f"{'shape':<6}{'dtype':>6}{'ranks':>6}{'pack':>6}  {'':<11}{'counted':>12}{'model':>11}  at its peak")
        outs = [root / f"{i}" for i in range(len(wanted))]
        for num_ranks in sorted({case.num_ranks for case in wanted}):
            mine = [pair for pair in zip(wanted, outs) if pair[0].num_ranks == num_ranks]
            run_world(num_ranks, [arguments(*each, data) for each in mine], root, SCRIPT)
        for case, out in zip(wanted, outs):
            rows.append(_row(case, out))
            if case.zero_stage == 3:
                items = tp_bytes(case.model, replace(case.setting, zero_stage=1), case.num_ranks, case.pack_tokens)
                rows.append(_shown(case, "TP", None, items, ""))
    return rows


def _row(case: Case, out: Path) -> dict:
    ranks = counts(out)
    told, phase, most = fullest(ranks)
    items = predicted(case, max(rank["tokens"] for rank in ranks), told["arena"])
    return _shown(case, kind(case), most["bytes"], items, phase) | {"counted": most["parts"]}


def _shown(case: Case, name: str, counted: int | None, items: dict[str, float], phase: str) -> dict:
    total = sum(items.values())
    text = "-" if counted is None else f"{counted / 2**20:.2f}"
    print(f"{case.shape:<6}{case.dtype:>6}{case.num_ranks:>6}{case.pack_tokens:>6}  {name:<11}{text:>12}"
          f"{total / 2**20:>11.2f}  {phase}", flush=True)  # fmt: skip
    return {
        "shape": case.shape, "dtype": case.dtype, "ranks": case.num_ranks, "pack_tokens": case.pack_tokens,
        "kind": name, "counted_bytes": counted, "predicted_bytes": round(total), "phase": phase,
        "predicted": {key: round(value) for key, value in items.items()},
    }  # fmt: skip


def paper() -> list[dict]:
    """The published case by the model: a row for each width of the feed-forward and what is kept of a layer."""
    print(f"\n{PAPER_TOKENS} tokens, D = {PAPER_DEGREE}, h 4096, 32 layers, 32 heads, bf16, GB a rank; published: "
          f"TSP {PUBLISHED['TSP'] / 1e9}, TP {PUBLISHED['TP'] / 1e9}")  # fmt: skip
    rows = []
    for width, ffn in WIDTHS.items():
        for how in ("none", "full"):
            model = ModelConfig(**PAPER, ffn_dim=ffn, checkpointing=how)
            setting = Setting(1, Topology(PAPER_DEGREE, 1), "zigzag", 1, how, 1, 1)
            tsp = tsp_bytes(model, setting, PAPER_DEGREE, PAPER_TOKENS // PAPER_DEGREE, 0.0)
            tp = tp_bytes(model, setting, PAPER_DEGREE, PAPER_TOKENS)
            kept = "q, k, v, o" if how == "none" else "o"
            totals = {name: sum(items.values()) / 1e9 for name, items in (("TSP", tsp), ("TP", tp))}
            print(f"{width:<58} keeping {kept:<11}: TSP {totals['TSP']:6.1f}  TP {totals['TP']:6.1f}")
            rows.append({"ffn": ffn, "kept": kept, "tsp": tsp, "tp": tp})
            # What is kept of a layer isn't published: the same with one input a layer where ours are two.
            less = {name: total - items["activations"] / 2e9 for (name, total), items in zip(totals.items(), (tsp, tp))}
            print(f"{'':<58} and one input, not two : TSP {less['TSP']:6.1f}  TP {less['TP']:6.1f}")
    return rows


if __name__ == "__main__":
    main()
