"""Runs of real processes that are killed or stopped and go on: with the same ranks bit for bit, with others too."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hsap.data.loader import StepLoader
from hsap.train.inputs import read_inputs
from tests.parity import REPOSITORY, SMALL_MODEL, write_data
from tests.parity.rank import configure

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "target_tokens", "doc_ids_hash")
NUM_STEPS = 10

pytestmark = pytest.mark.slow


def settings(folder, out, *more):
    values = {
        "data.path": folder / "ragged.jsonl",
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.pack_tokens": 192,
        "train.steps": NUM_STEPS,
        "train.packs_per_step": 4,
        "train.micro_packs": 2,
        "train.save_every": 2,
        "train.keep": 9,
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "optim.warmup_steps": 2,
        "out": folder / out,
        **SMALL_MODEL,
    }
    return [*(f"{key}={value}" for key, value in values.items()), *more]


def start(folder, out, *more, ranks=None):
    """Start train.py, under torchrun where `ranks` are given."""
    bin = Path(sys.executable).parent
    by = [sys.executable] if ranks is None else [str(bin / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [*by, str(REPOSITORY / "train.py"), *settings(folder, out, *more)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(run):
    _, told = run.communicate(timeout=600)
    assert run.returncode == 0, told[-3000:]
    return told


def train(folder, out, *more, ranks=None):
    return finish(start(folder, out, *more, ranks=ranks))


def metrics(out):
    """Whole lines only: a run may be writing the last one."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [{key: json.loads(line)[key] for key in SAME} for line in lines if line.endswith("\n")]


def newest(home):
    return int((home / "latest").read_text().removeprefix("step"))


def wait_for(run, reached):
    while not reached():
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.01)


def ranks_of(run):
    return [child for child in psutil.Process(run.pid).children() if "train.py" in " ".join(child.cmdline())]


def kill(run):
    """SIGKILL to every process of a run."""
    all_of_it = [*psutil.Process(run.pid).children(recursive=True), run]
    for process in all_of_it:
        process.kill()
    run.communicate(timeout=60)
    psutil.wait_procs(all_of_it[:-1], timeout=60)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_data(folder)
    train(folder, "unbroken", "+topology=2x1")
    steps = metrics(folder / "unbroken")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    return folder, steps


@pytest.mark.parametrize("background", ["false", "true"])
def test_killed_at_any_moment_and_resumed_a_run_repeats_the_unbroken_one_bit_for_bit(unbroken, background):
    folder, steps = unbroken
    out = folder / f"killed-{background}"
    more = ["+topology=2x1", "train.save_every=1", "train.keep=1", f"train.save_in_background={background}"]
    home = out / "checkpoints"
    run = start(folder, out.name, *more)
    # In a step or in writing, as it falls; then, as a checkpoint is being written.
    wait_for(run, lambda: len(metrics(out)) >= 3)
    kill(run)
    for step in (6, 8):
        run = start(folder, out.name, *more, "resume=true")
        wait_for(run, lambda step=step: (home / f".step{step}.tmp").exists() or newest(home) >= step)
        kill(run)
    train(folder, out.name, *more, "resume=true")
    assert metrics(out) == steps
    assert sorted(path.name for path in home.iterdir()) == ["latest", f"step{NUM_STEPS}"]


LEGS = [
    ("+topology=4x1", "engine.zero_stage=1", None),
    ("+topology=2x2", "engine.zero_stage=3", None),
    ("+topology=1x1", "engine.zero_stage=0", None),
    ("+topology=2x1", "engine.zero_stage=1", 4),
    ("+topology=1x1", "engine.zero_stage=2", 2),
]
"""Legs of one run, two steps each: topology, ZeRO stage, and torchrun's ranks where they are two SP groups."""


def test_a_run_goes_on_with_any_topology_world_size_and_zero_stage(unbroken):
    folder, steps = unbroken
    out = folder / "elastic"
    for leg, (topology, stage, ranks) in enumerate(LEGS):
        if leg:
            (out / "checkpoints" / "latest").write_text(f"step{2 * leg}")
        resume = f"resume={'true' if leg else 'false'}"
        train(folder, "elastic", topology, stage, resume, "planner=zigzag" if leg == 1 else "planner=sap", ranks=ranks)
        state = json.loads((out / "checkpoints" / f"step{2 * leg + 2}" / "hsap.json").read_text())
        assert f"+topology={state['topology']}" == topology and state["adam_steps"] == 2 * leg + 2
    for one, two in zip(steps, metrics(out), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
        same = ("step", "lr", "tokens", "target_tokens", "doc_ids_hash")
        assert all(one[key] == two[key] for key in same)


def test_the_logged_documents_are_those_of_the_seed_none_twice_or_lost(unbroken):
    """A walk over the data by one process gives the hashes of ids that the run has logged, and each epoch is whole."""
    folder, steps = unbroken
    config = configure(settings(folder, "none"), 1)
    data = read_inputs(config).train_data
    seen = {}
    with StepLoader(data, config.packing, packs_per_step=4, micro_packs=4, seed=config.train.seed) as loader:
        for step, batch in zip(steps, loader):
            assert step["doc_ids_hash"] == batch.doc_ids_hash
            seen.setdefault(batch.epoch, []).append(batch.num_tokens)
    total = int(data.lengths.sum())
    done = sum(step["tokens"] for step in steps)
    assert len(seen) > 2 and abs(done - total * len(seen)) < total


def test_zero_0_in_bf16_and_zero_3_hold_the_same_run(unbroken):
    folder, _ = unbroken
    bf16 = ["engine.dtype=bf16", "+topology=1x1", "train.steps=4"]
    losses = {}
    train(folder, "bf16", *bf16, "engine.zero_stage=1", ranks=2)
    for stage in (0, 1, 2, 3):
        out = folder / f"bf16-{stage}"
        shutil.copytree(folder / "bf16", out)
        (out / "checkpoints" / "latest").write_text("step2")
        train(folder, out.name, *bf16, f"engine.zero_stage={stage}", "resume=true", ranks=2)
        losses[stage] = [step["loss"] for step in metrics(out)]
    assert losses[1] == [step["loss"] for step in metrics(folder / "bf16")]
    for stage in (0, 2, 3):
        assert losses[stage] == pytest.approx(losses[1], rel=1e-3)
        # The first step after the checkpoint has seen no update of this stage.
        assert losses[stage][2] == losses[1][2]


@pytest.mark.parametrize("whom", ["the launcher", "rank 0", "rank 1"])
def test_a_signal_finishes_the_step_saves_and_ends_well(unbroken, whom):
    folder, steps = unbroken
    out = folder / f"stopped by {whom}".replace(" ", "-")
    run = start(folder, out.name, "+topology=2x1", "train.save_every=0")
    wait_for(run, lambda: len(metrics(out)) >= 2)
    who = run if whom == "the launcher" else next(r for r in ranks_of(run) if r.environ()["RANK"] == whom[-1])
    who.send_signal(signal.SIGTERM if whom != "rank 1" else signal.SIGINT)
    told = finish(run)
    at = len(metrics(out))
    assert 2 <= at < NUM_STEPS and (out / "checkpoints" / "latest").read_text() == f"step{at}"
    name = "SIGINT" if whom == "rank 1" else "SIGTERM"
    assert f"hsap: {name}: stopped after step {at}, which is saved; resume=true out={out} goes on" in told
    train(folder, out.name, "+topology=2x1", "resume=true")
    assert metrics(out) == steps


def test_torchrun_passes_the_signal_on(unbroken):
    folder, _ = unbroken
    run = start(folder, "torchrun", "+topology=2x1", ranks=2)
    wait_for(run, lambda: len(metrics(folder / "torchrun")) >= 2)
    run.send_signal(signal.SIGTERM)
    _, told = run.communicate(timeout=600)
    at = len(metrics(folder / "torchrun"))
    assert f"hsap: SIGTERM: stopped after step {at}, which is saved" in told
    assert (folder / "torchrun" / "checkpoints" / "latest").read_text() == f"step{at}"


def test_one_interrupt_is_noted_and_a_second_ends_at_once():
    code = (
        "import time; from hsap.train.stopping import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while stop.asked_by is None: time.sleep(0.01)\n"
        "    print(stop.asked_by.name, flush=True)\n"
        "    time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    for expected in ("ready", "SIGINT"):
        assert run.stdout.readline().strip() == expected and run.poll() is None
        run.send_signal(signal.SIGINT)
    assert run.wait(timeout=30) == -signal.SIGINT


def test_a_damaged_file_is_found_before_training_and_a_good_one_named(unbroken):
    folder, _ = unbroken
    out = folder / "damaged"
    shutil.copytree(folder / "unbroken", out)
    path = out / "checkpoints" / f"step{NUM_STEPS}" / "rank1.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    run = start(folder, "damaged", "+topology=2x1", "resume=true")
    _, told = run.communicate(timeout=600)
    assert run.returncode == 1
    assert f"{path} is damaged: it doesn't have the SHA-256" in told and "the newest good one is step8" in told
