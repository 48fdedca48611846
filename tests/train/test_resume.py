"""Runs of real processes that are killed or stopped and go on: with the same ranks bit for bit, with others too."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hsap.data.batch import doc_ids_hash
from hsap.data.packing import PackStream
from hsap.train.checkpoints.folder import damage, read_state
from hsap.train.inputs import read_inputs
from tests.bench.runs import figures
from tests.parity import REPOSITORY, write_data
from tests.parity.rank import configure
from tests.train.worlds import SMALL_MODEL, World

NUM_STEPS = 10

pytestmark = pytest.mark.slow


def settings(folder, out, *more):
    values = {
        "data.path": folder / "ragged.jsonl",
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.cache": folder / "cache",
        "data.pack_tokens": 192,
        "train.steps": NUM_STEPS,
        "train.packs_per_step": 4,
        "train.micro_packs": 2,
        "train.save_every": 1,
        "train.keep": 99,
        "train.tensorboard": "false",
        "engine.device": "cpu",
        "optim.warmup_steps": 2,
        "verify": "false",
        "out": folder / out,
        **{f"model.{key}": value for key, value in SMALL_MODEL.items()},
    }
    return [*(f"{key}={value}" for key, value in values.items()), *more]


def world(folder, out, num_ranks, *more):
    return World(folder, num_ranks, settings(folder, out, *more))


def train(folder, out, num_ranks, *more):
    return world(folder, out, num_ranks, *more).finish()


def newest(out):
    """The step of the newest checkpoint, 0 where there is none."""
    path = out / "checkpoints" / "latest"
    return int(path.read_text().removeprefix("step")) if path.exists() else 0


def state_of(out, step):
    return json.loads((out / "checkpoints" / f"step{step}" / "hsap.json").read_text())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of two ranks, with the checkpoint of every step."""
    folder = tmp_path_factory.mktemp("resume")
    write_data(folder)
    train(folder, "unbroken", 2, "+topology=2x1")
    steps = figures(folder / "unbroken")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    return folder, steps


@pytest.mark.parametrize("background", ["false", "true"])
def test_killed_at_any_moment_and_resumed_a_run_repeats_the_unbroken_one_bit_for_bit(unbroken, background):
    folder, steps = unbroken
    out, moments = folder / f"killed-{background}", random.Random(f"moments {background}")
    more = ["+topology=2x1", "train.keep=1", f"train.save_in_background={background}"]
    for kill in range(5):
        before = newest(out)
        resume = f"resume={'true' if before else 'false'}"
        run = world(folder, out.name, 2, *more, resume)
        if kill % 2:
            # As a checkpoint is being written.
            step = before + moments.choice((1, 2))
            run.wait_for(lambda: (out / "checkpoints" / f".step{step}.tmp").exists() or newest(out) >= step)  # noqa: B023
            time.sleep(moments.uniform(0, 0.02))
        else:
            # In a step, between steps or in writing, as it falls.
            run.wait_for(lambda: newest(out) > before)  # noqa: B023
            time.sleep(moments.uniform(0, 0.4))
        run.kill(moments)
        config = configure(settings(folder, out.name), 2)
        state = read_state(config)
        assert state["step"] >= before and not damage(out / f"checkpoints/step{state['step']}", state, state["files"])
    train(folder, out.name, 2, *more, "resume=true")
    assert figures(out) == steps
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", f"step{NUM_STEPS}"]
    # Weights and moments as well, and the place in the data.
    for part in ("files", "cursor"):
        assert state_of(out, NUM_STEPS)[part] == state_of(folder / "unbroken", NUM_STEPS)[part]


def check_elastic(folder, out, legs, first, num_steps, steps):
    """Go on from the checkpoint of step `first` with one leg after the other; compare with the unbroken run's steps."""
    at = first
    for number, (num_ranks, topology, *more) in enumerate(legs):
        last = at + num_steps
        leg = [f"+topology={topology}", *more, f"resume={'true' if at else 'false'}"]
        train(folder, out.name, num_ranks, *leg)
        state = state_of(out, last)
        assert state["topology"] == topology and state["world_size"] == num_ranks and state["adam_steps"] == last
        if number < len(legs) - 1:
            (out / "checkpoints" / "latest").write_text(f"step{last}")
        at = last
    found = figures(out)[:at]
    same = ("step", "lr", "tokens", "target_tokens", "doc_ids_hash")
    assert [[step[key] for key in same] for step in found] == [[step[key] for key in same] for step in steps[:at]]
    differs = {
        key: max(abs(one[key] - two[key]) / two[key] for one, two in zip(found, steps)) for key in ("loss", "grad_norm")
    }
    assert differs["loss"] <= 1e-5 and differs["grad_norm"] <= 1e-4
    return differs


def check_none_twice_or_lost(folder, out, ends, steps):
    """Deal the documents anew from the cursors that each leg began with: what was logged, and each token equally often.

    ends: the last step of each leg.
    """
    config = configure(settings(folder, "never"), 1)
    data = read_inputs(config).train_data
    seen = np.zeros(len(data.tokens), dtype=int)
    first = 0
    for last in ends:
        stream = PackStream(data.lengths, config.packing, config.train.packs_per_step, config.train.seed)
        if first:
            stream.load_state_dict(state_of(out, first)["cursor"])
        for step, dealt in zip(steps[first:last], stream):
            assert dealt.step == step["step"] and doc_ids_hash(data, dealt.packs) == step["doc_ids_hash"]
            for piece in (piece for pack in dealt.packs for piece in pack):
                start = data.starts[piece.document]
                seen[start + piece.start : start + piece.stop] += 1
        first = last
    assert seen.min() >= 2 and seen.max() <= seen.min() + 1, "in every epoch each token once"
    assert seen.sum() == sum(step["tokens"] for step in steps[:first])


LEGS = [
    (1, "1x1", "engine.zero_stage=0"),
    (4, "2x2", "engine.zero_stage=3", "planner=zigzag", "data.lookahead=0"),
    (4, "2x1", "engine.zero_stage=1", "train.micro_packs=1"),
    (2, "1x1", "engine.zero_stage=2"),
]
"""Legs of one run: ranks, topology and what else changes; the last two have two SP groups."""


def test_a_run_goes_on_with_any_topology_world_size_and_zero_stage(unbroken):
    folder, steps = unbroken
    out, home = folder / "elastic", folder / "unbroken"
    (out / "checkpoints").mkdir(parents=True)
    shutil.copytree(home / "checkpoints" / "step2", out / "checkpoints" / "step2")
    (out / "checkpoints" / "latest").write_text("step2")
    shutil.copy(home / "metrics.jsonl", out)
    check_elastic(folder, out, LEGS, 2, 2, steps)
    check_none_twice_or_lost(folder, out, (2, 4, 6, 8, 10), figures(out))


@pytest.mark.exhaustive
def test_from_eight_ranks_to_four_to_one_and_to_two_groups(unbroken):
    folder, steps = unbroken
    legs = [
        (8, "4x2", "engine.zero_stage=1"),
        (4, "2x2", "engine.zero_stage=3"),
        (1, "1x1", "engine.zero_stage=0"),
        (4, "2x1", "engine.zero_stage=1"),
    ]
    differs = check_elastic(folder, folder / "eight", legs, 0, 2, steps)
    print(f"largest relative difference from the unbroken run: {differs}")
    check_none_twice_or_lost(folder, folder / "eight", (2, 4, 6, 8), figures(folder / "eight"))


def test_in_bf16_every_zero_stage_goes_on_from_the_float32_weights(unbroken):
    folder, _ = unbroken
    bf16 = ["engine.dtype=bf16", "+topology=1x1", "train.steps=4"]
    train(folder, "bf16", 2, *bf16, "engine.zero_stage=1")
    losses = {1: [step["loss"] for step in figures(folder / "bf16")]}
    for stage in (0, 2, 3):
        out = folder / f"bf16-{stage}"
        shutil.copytree(folder / "bf16", out)
        (out / "checkpoints" / "latest").write_text("step2")
        train(folder, out.name, 2, *bf16, f"engine.zero_stage={stage}", "resume=true")
        losses[stage] = [step["loss"] for step in figures(out)]
        assert losses[stage] == pytest.approx(losses[1], rel=1e-3)
        # The first step after the checkpoint has seen no update of this stage.
        assert losses[stage][2] == losses[1][2]


@pytest.mark.parametrize("rank,number", [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_to_one_rank_finishes_the_step_saves_and_ends_well(unbroken, rank, number):
    folder, steps = unbroken
    out = folder / f"stopped-{rank}"
    background = f"train.save_in_background={'true' if rank else 'false'}"
    run = world(folder, out.name, 2, "+topology=2x1", "train.save_every=0", background)
    run.wait_for(lambda: len(figures(out)) >= 2)
    os.kill(run.ranks[rank].pid, number)
    told = run.finish()
    at = len(figures(out))
    assert 2 <= at < NUM_STEPS and newest(out) == at
    assert f"hsap: {number.name}: stopped after step {at}, which is saved; resume=true out={out} goes on" in told
    assert told.count("the trained model isn't kept: train.save_every=N") == 1
    told = train(folder, out.name, 2, "+topology=2x1", "resume=true", "train.save_every=0")
    assert figures(out) == steps and newest(out) == NUM_STEPS, "a resumed run keeps its end"
    assert "isn't kept" not in told


@pytest.mark.parametrize("launcher", ["train.py", "torchrun"])
def test_a_signal_to_the_launcher_reaches_the_ranks(unbroken, launcher):
    folder, steps = unbroken
    out, bin = folder / launcher, Path(sys.executable).parent
    by = [sys.executable]
    if launcher == "torchrun":
        by = [str(bin / "torchrun"), "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    run = subprocess.Popen(
        [*by, str(REPOSITORY / "train.py"), *settings(folder, out.name, "+topology=2x1", "train.save_every=0")],
        cwd=folder,
        env={**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while len(figures(out)) < 2 and run.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    _, told = run.communicate(timeout=120)
    at = len(figures(out))
    assert f"hsap: SIGTERM: stopped after step {at}, which is saved" in told
    assert 2 <= at < NUM_STEPS and newest(out) == at and figures(out) == steps[:at]
    # torchrun ends with an error of its own wherever it was sent a signal.
    assert run.returncode == 0 or launcher == "torchrun", told[-3000:]


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
    told = world(folder, "damaged", 2, "+topology=2x1", "resume=true", "train.steps=99").finish(code=1)
    assert f"{path} is damaged: it doesn't have the SHA-256" in told
    assert f"the newest good one is step{NUM_STEPS - 1}" in told
