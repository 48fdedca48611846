"""Loss parity: the same run on every topology, ZeRO stage and accumulation gives one process's numbers.

The data is made to be awkward: ragged packs, one-token documents, a pack without any target token and ranks without
any row. `python -m tests.parity` (or `make parity`) runs all cases and prints a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hsap.checks.difference import Difference, Outcome, difference

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("rank.py")
PACK_TOKENS = 192
NUM_STEPS = 20
LENGTHS = [[192], [101, 57, 33, 1], [64, 63, 61], [1], [187, 3], [1, 1, 1, 90, 45, 44], [150, 40], [128, 13, 50]]
"""Document lengths of the packs of one epoch; the fourth pack is one token and has no target."""

SMALL_MODEL = {
    "model.num_layers": 2,
    "model.hidden_dim": 64,
    "model.head_dim": 8,
    "model.ffn_dim": 96,
    "model.num_q_heads": 8,
    "model.num_kv_heads": 2,
    "model.vocab_size": 2048,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run: topology, dp SP groups, ZeRO stage, packs per SP group and micro-step, planner, masks of the layers."""

    topology: str
    dp: int = 1
    zero_stage: int = 1
    micro_packs: int = 4
    planner: str = "sap"
    dtype: str = "fp32"
    masks: str = "causal"
    heads: tuple[int, int] = (8, 2)
    tsp_axis: str | None = None

    @property
    def num_ranks(self) -> int:
        inter, intra = self.topology.split("x")
        return int(inter) * int(intra) * self.dp

    @property
    def name(self) -> str:
        accumulation = 4 // (self.dp * self.micro_packs)
        return f"dp{self.dp} x {self.topology} {self.planner} zero{self.zero_stage} acc{accumulation}" + (
            (f" {self.masks}" if self.masks != "causal" else "")
            + (f" tsp {self.tsp_axis}" if self.tsp_axis else "")
            + (" {}/{}".format(*self.heads) if self.heads != (8, 2) else "")
        )

    @property
    def base(self) -> Case:
        """The run of one process that this one must equal."""
        return Case("1x1", zero_stage=0, masks=self.masks, heads=self.heads)


CASES = [
    Case("1x1", zero_stage=3, micro_packs=2),
    Case("8x1", zero_stage=1),
    Case("8x1", zero_stage=1, planner="zigzag"),
    Case("4x2", zero_stage=0),
    Case("4x2", zero_stage=2, micro_packs=2),
    Case("4x2", zero_stage=3),
    Case("4x2", zero_stage=1, planner="distflash", micro_packs=2),
    Case("2x4", zero_stage=3, micro_packs=2),
    Case("2x4", zero_stage=1, planner="ring"),
    Case("1x8", zero_stage=1),
    Case("2x2", dp=2, zero_stage=1, micro_packs=2),
    Case("2x2", dp=2, zero_stage=2, micro_packs=1),
    Case("2x2", dp=2, zero_stage=3, micro_packs=1),
    Case("4x2", zero_stage=1, micro_packs=2, masks="window:24+causal"),
    Case("4x2", zero_stage=1, planner="auto"),
    Case("8x1", zero_stage=1, planner="dcp"),
    Case("4x2", zero_stage=1, planner="flashcp", micro_packs=2),
    Case("4x2", zero_stage=1, planner="basp", micro_packs=2),
    Case("8x1", zero_stage=3, planner="basp", micro_packs=2),
    Case("4x2", zero_stage=3, planner="nested", micro_packs=2),
    Case("8x1", zero_stage=1, planner="nested", masks="window:24+causal"),
    Case("8x1", zero_stage=1, planner="zigzag", micro_packs=2, tsp_axis="all"),
    Case("2x4", zero_stage=0, planner="sap", tsp_axis="intra", heads=(9, 3)),
    Case("2x2", dp=2, zero_stage=1, planner="zigzag", micro_packs=1, masks="window:24+causal", tsp_axis="all"),
]


def write_data(folder: Path) -> Path:
    """Write the documents as token ids, so that one-token documents stay one token."""
    generator = torch.Generator().manual_seed(11)
    path = folder / "ragged.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i, length in enumerate(n for pack in LENGTHS for n in pack):
            tokens = torch.randint(2, 512, (length,), generator=generator).tolist()
            file.write(json.dumps({"id": str(i), "tokens": tokens}) + "\n")
    return path


def arguments(case: Case, data: Path, out: Path, steps: int = NUM_STEPS) -> list[str]:
    """What train.py is told to run a case."""
    settings = {
        "+topology": case.topology,
        "planner": case.planner,
        "data.path": data,
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.cache": data.parent / "cache",
        "data.pack_tokens": PACK_TOKENS,
        "train.steps": steps,
        "train.packs_per_step": 4,
        "train.micro_packs": case.micro_packs,
        "train.tensorboard": "false",
        "engine.zero_stage": case.zero_stage,
        "engine.dtype": case.dtype,
        "engine.device": "cpu",
        "model.masks": case.masks,
        "optim.warmup_steps": 5,
        **SMALL_MODEL,
        "model.num_q_heads": case.heads[0],
        "model.num_kv_heads": case.heads[1],
        "out": out,
    }
    if case.tsp_axis is not None:
        settings |= {"parallel": "tsp", "tsp_axis": case.tsp_axis}
    return [f"{key}={value}" for key, value in settings.items()]


def run_world(num_ranks: int, runs: list[list[str]], folder: Path, script: Path = SCRIPT) -> None:
    """Train runs one after the other in one fresh world of processes; RuntimeError with its output where it fails.

    script: what each rank runs, given a JSON file with the runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / f"runs-{num_ranks}.json"
    listed.write_text(json.dumps(runs), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={num_ranks}", str(script), str(listed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{num_ranks} ranks: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )


def run_cases(
    cases: list[Case], root: Path, steps: int = NUM_STEPS, run: Callable[..., None] = run_world
) -> list[Path]:
    """Run cases, one world (see `run_world`) for each number of ranks; each one's directory under root."""
    root.mkdir(parents=True, exist_ok=True)
    data = write_data(root)
    outs = [root / f"{i}" for i in range(len(cases))]
    for num_ranks in sorted({case.num_ranks for case in cases}):
        mine = [(case, out) for case, out in zip(cases, outs) if case.num_ranks == num_ranks]
        run(num_ranks, [arguments(case, data, out, steps) for case, out in mine], root)
    return outs


def compare(base: Path, other: Path) -> Difference:
    """Compare step-1 gradients (relative RMSE) and the last step's loss and gradient norm."""
    last = [json.loads((p / "metrics.jsonl").read_text().splitlines()[-1]) for p in (base, other)]
    assert last[0]["step"] == last[1]["step"] and last[0]["doc_ids_hash"] == last[1]["doc_ids_hash"]
    want, got = (
        Outcome(figures["loss"], figures["grad_norm"], torch.load(p / "gradients.pt", weights_only=True))
        for p, figures in zip((base, other), last)
    )
    return difference(want, got)
