"""train.py on real processes: what it writes, how it goes on, and how it ends where something is wrong."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hsap.view import read_run
from tests.parity import LENGTHS, REPOSITORY, SMALL_MODEL, Case, compare, run_cases, write_data
from tests.train.worlds import World, run_world

KEYS = {
    *("step", "loss", "grad_norm", "tokens", "target_tokens", "tokens_per_s", "padding_share", "area_imbalance"),
    *("plan_wait_s", "data_wait_s", "step_s", "doc_ids_hash"),
}
SAME = ("loss", "grad_norm", "tokens", "target_tokens", "padding_share", "area_imbalance", "doc_ids_hash")
NUM_STEPS = 6

pytestmark = pytest.mark.slow


def settings(folder):
    """The ragged data of the parity cases: four packs a step, the fourth of one token."""
    values = {
        "data.path": folder / "ragged.jsonl",
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.pack_tokens": 192,
        "train.steps": NUM_STEPS,
        "train.packs_per_step": 4,
        "train.micro_packs": 2,
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "optim.warmup_steps": 2,
        **SMALL_MODEL,
    }
    return [f"{key}={value}" for key, value in values.items()]


def train(folder, *arguments, by=(sys.executable,)):
    """Run train.py."""
    bin = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [*by, str(REPOSITORY / "train.py"), *settings(folder), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def forked(folder, out, *arguments):
    """Do what train.py does on two ranks, which take less time to start here; give what they said."""
    return World(folder, 2, [*settings(folder), "+topology=2x1", f"out={folder / out}", *arguments]).finish()


def metrics(out):
    return [json.loads(line, parse_constant=pytest.fail) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(step):
    return {key: step[key] for key in SAME}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An unbroken run of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    write_data(folder)
    options = ["train.save_every=2", "train.keep=2", "train.eval_every=4", f"data.eval_path={folder / 'ragged.jsonl'}"]
    options.append("profile.steps=[4,6]")
    done = train(folder, "+topology=2x1", "out=first", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, options, done


def test_metrics_hold_what_scripts_rely_on(finished):
    folder, _, _ = finished
    steps = metrics(folder / "first")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(step.keys() >= KEYS for step in steps)
    assert [step["step"] for step in steps if "eval_loss" in step] == [4, NUM_STEPS]
    for step in steps:
        assert all(isinstance(step[key], (int, float)) for key in KEYS - {"doc_ids_hash"}), step
        assert 0 < step["target_tokens"] < step["tokens"] <= 4 * 192
        assert step["padding_share"] == pytest.approx(1 - step["tokens"] / (4 * 192))
        assert step["area_imbalance"] >= 1 and step["step_s"] > 0
    # Untrained, a model is as good as chance: ln 2048. Tokens are random but for what the step before has shown.
    assert steps[0]["loss"] == pytest.approx(7.62, abs=0.05)
    assert steps[-1]["eval_loss"] < steps[3]["eval_loss"] < 7.6


def test_a_run_says_little(finished):
    _, _, done = finished
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 4", f"step {NUM_STEPS}"]
    # Below a step a second, the bar has it the other way round.
    lines = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip()]
    left = [line for line in lines if "step/s" not in line and "s/step" not in line]
    told = "hsap: 2 ranks on cpu (2x1, dp 1), planner sap, 188,736 parameters, writing to first"
    assert left == [told], "one line on what runs, and then nothing but the progress bar of one rank"
    assert done.stderr.count(f" 0/{NUM_STEPS} [") == 1


def test_planning_in_processes_and_a_leak_check_change_nothing(finished):
    """Bit for bit, with every plan made elsewhere and further ahead; and nothing is left of them."""
    folder, options, _ = finished
    told = forked(folder, "workers", *options, "data.workers=2", "data.lookahead=3", "check.leak=true")
    assert "planning worker" not in told
    assert told.count("hsap: leak check: ") == 1 and "keep every bit" in told
    assert list(map(same, metrics(folder / "workers"))) == list(map(same, metrics(folder / "first")))


def timelines(out):
    """Lines of both ranks by step, micro-step, layer and direction; each is there once."""
    by_rank = []
    for rank in range(2):
        lines = [json.loads(line) for line in (out / f"timeline-rank{rank}.jsonl").read_text().splitlines()]
        by_rank.append({tuple(line[key] for key in ("step", "micro", "layer", "direction")): line for line in lines})
        assert len(by_rank[-1]) == len(lines) and all(line["rank"] == rank for line in lines)
    return by_rank


def test_a_profiled_run_is_shown_beside_its_plan(finished):
    """Steps 4 and 5 of two micro-steps each; of the measured attention no more than the step's time."""
    out = finished[0] / "first"
    layers = range(SMALL_MODEL["model.num_layers"])
    wanted = set(itertools.product((4, 5), (0, 1), layers, ("forward", "backward")))
    step_s = {step["step"]: step["step_s"] for step in metrics(out)}
    for lines in timelines(out):
        assert lines.keys() == wanted
        for step in (4, 5):
            spent_s = [line["end_s"][-1] - line["start_s"][0] for key, line in lines.items() if key[0] == step]
            assert 0 < sum(spent_s) < step_s[step]
    run = read_run(out, step=4, layer=1)
    assert (run.step, run.layer) == (4, 1) and len(run.courses) == len(run.plan.programs)
    assert all(0 < course.makespan_s < step_s[4] for course in run.courses[0])
    page = out / "report.html"
    command = [sys.executable, "-m", "hsap.cli", "view", str(out), "-o", str(page)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "measured" in page.read_text()


def test_only_the_newest_checkpoints_are_kept(finished):
    folder, _, _ = finished
    kept = folder / "first" / "checkpoints"
    assert sorted(p.name for p in kept.glob("step*")) == ["step4", "step6"]
    assert (kept / "latest").read_text() == "step6"


def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(finished):
    """As after a crash in step 6: the checkpoint of step 4, and metrics beyond it, the last line cut off."""
    folder, options, _ = finished
    shutil.copytree(folder / "first", folder / "second")
    checkpoints = folder / "second" / "checkpoints"
    (checkpoints / "latest").write_text("step4")
    lines = (folder / "first" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "second" / "metrics.jsonl").write_text("".join([*lines[:4], '{"step": 5, "loss": 1}\n', lines[5][:30]]))
    forked(folder, "second", "resume=true", *options)
    first, second = metrics(folder / "first"), metrics(folder / "second")
    assert first[:4] == second[:4]
    assert [same(step) for step in first] == [same(step) for step in second]
    assert all(
        lines.keys() == again.keys() for lines, again in zip(*map(timelines, (folder / "first", folder / "second")))
    )
    assert first[-1]["eval_loss"] == second[-1]["eval_loss"]
    assert sorted(p.name for p in checkpoints.glob("step*")) == ["step4", "step6"]


def test_packs_that_grow_and_documents_that_are_kept_resume_in_the_middle_of_a_stage(finished):
    """Packs of 48, then of 96 tokens; some longer documents are whole, the others cut."""
    folder, _, _ = finished
    options = ["data.packing=balanced", "data.pack_tokens=48", "data.curriculum=[[3,96]]", "data.long_documents=keep"]
    options += ["data.max_document_tokens=100", "data.max_delay_steps=2", "train.micro_packs=1"]
    said = forked(folder, "grown", "train.save_every=4", *options)
    lengths = [length for pack in LENGTHS for length in pack]
    for pack_tokens in (48, 96):
        cut, kept = sum(n > 100 for n in lengths), sum(pack_tokens < n <= 100 for n in lengths)
        told = [f"{cut} cut"] * (cut > 0) + [f"{kept} kept whole"] * (kept > 0)
        line = f"hsap: of {len(lengths)} documents, longer than {pack_tokens} tokens: {', '.join(told)}"
        assert cut and line in said.splitlines()
    grown = metrics(folder / "grown")
    assert [step["pack_tokens"] for step in grown] == [48, 48, 96, 96, 96, 96]
    assert all(0 <= step["padding_share"] < 1 for step in grown)
    shutil.copytree(folder / "grown", folder / "regrown")
    (folder / "regrown" / "checkpoints" / "latest").write_text("step4")
    forked(folder, "regrown", "resume=true", *options)
    assert [same(step) for step in grown] == [same(step) for step in metrics(folder / "regrown")]


def test_two_sp_groups_of_torchrun_train_as_one(finished):
    folder, _, _ = finished
    torchrun = (str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node=2")
    done = train(folder, "+topology=1x1", "out=dp2", "train.steps=3", "engine.zero_stage=3", by=torchrun)
    assert done.returncode == 0, done.stderr[-3000:]
    # The cosine is another with other steps, but the first three losses come from the same two warm-up updates.
    for one, two in zip(metrics(folder / "first")[:3], metrics(folder / "dp2"), strict=True):
        assert one["doc_ids_hash"] == two["doc_ids_hash"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_auto_is_decided_by_one_rank_and_trains_the_same(finished):
    """Ranks compare their plans' hashes in every step, and only the publisher's may be the winner's."""
    folder, _, _ = finished
    said = forked(folder, "auto", "planner=auto", "planner.candidates=zigzag|ring|sap", "train.steps=3")
    assert "planner auto, 188,736 parameters" in said
    for one, two in zip(metrics(folder / "first")[:3], metrics(folder / "auto"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert one["planners"] == {"sap": 2} and "choice" not in one
        assert len(two["choice"]) == 2 == sum(two["planners"].values())
        chosen = {}
        for choice in two["choice"]:
            assert list(choice) == ["ring", "zigzag", "sap"] and min(choice.values()) > 0
            best = min(choice, key=choice.get)
            chosen[best] = chosen.get(best, 0) + 1
        assert two["planners"] == chosen


def test_what_one_rank_finds_while_planning_ends_all_with_one_paragraph(finished):
    folder, _, _ = finished
    done = train(folder, "+topology=2x1", "out=arena", "arena_multiple=0.5")
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()[-1:]
    assert told.startswith("train.py: planner sap: rank ") and "raise arena_multiple" in told
    assert "Traceback" not in done.stderr and done.stderr.count("raise arena_multiple") == 1


def test_what_all_ranks_find_in_the_data_is_said_once(finished):
    folder, _, _ = finished
    (folder / "bad.jsonl").write_text('{"tokens": [2, 3, 4]}\n{"tokens": [2, 3, 2048]}\n')
    done = train(folder, "+topology=2x1", "out=bad", f"data.path={folder / 'bad.jsonl'}")
    assert done.returncode == 1
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"train.py: {folder / 'bad.jsonl'}:2: token 2 of the document has id 2048, outside")
    assert not (folder / "bad").exists()


def test_training_that_diverges_ends(finished):
    folder, _, _ = finished
    # Embeddings of tokens that the first step doesn't show have no gradient: without an epsilon, Adam makes it 0 / 0.
    done = train(folder, "+topology=1x1", "out=far", "optim.eps=1e-60", "model.tied_embeddings=false")
    assert done.returncode == 1
    assert (
        "train.py: step 2: the loss is nan and the gradient's norm is nan; training has diverged. Lower optim.lr"
        in (done.stderr)
    )
    assert "elements of model.embed_tokens.weight" in done.stderr
    assert "the first output that isn't finite is that of model.embed_tokens on rank 0" in done.stderr
    assert [step["step"] for step in metrics(folder / "far")] == [1]


def test_topologies_zero_stages_and_accumulation_change_nothing(tmp_path):
    """A small part of `make parity`, at the same bars."""
    cases = [
        Case("1x1", zero_stage=0),
        Case("2x2", zero_stage=1),
        Case("2x1", dp=2, zero_stage=3, micro_packs=1),
        Case("4x1", zero_stage=0, dtype="bf16"),
        Case("2x1", dp=2, zero_stage=1, micro_packs=1, dtype="bf16"),
        Case("2x2", masks="window:24+causal"),
        Case("1x1", zero_stage=0, masks="window:24+causal"),
    ]
    outs = dict(zip(cases, run_cases(cases, tmp_path, 5, run_world)))
    for case, out in outs.items():
        difference = compare(outs[case.base], out)
        # bf16 rounds each gradient, and the loss of five steps is not yet far from that of exact updates.
        good = difference.ok if case.dtype == "fp32" else difference.all_gradients < 2e-2 and difference.loss < 2e-4
        assert good, f"{case.dtype} {case.name}: {difference}"
