"""Checkpoints of a process that is killed while it writes them, and of one whose disk is full."""

import random
import resource
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hsap.train.checkpoints.folder import damage, folder, read_state
from hsap.train.checkpoints.saver import Saver
from hsap.train.checkpoints.tensors import Pieces
from hsap.train.overrides import know_project
from tests.parity import REPOSITORY
from tests.parity.rank import configure
from tests.train.worlds import fork

pytestmark = pytest.mark.slow

WIDTH = 512


def configuration(out, background):
    know_project(REPOSITORY)
    return configure([f"out={out}", f"train.save_in_background={background}", "train.keep=2", "train.steps=99999"], 1)


def begin(out, background):
    """A saver of one rank, and an engine of one matrix under Adam."""
    config = configuration(out, background)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}-{time.monotonic_ns()}", 1), rank=0, world_size=1)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    engine = SimpleNamespace(
        device=torch.device("cpu"), deepspeed=SimpleNamespace(module=model, optimizer=optimizer, mpu=None)
    )
    return Saver(config, {}), engine


def train_one(engine, step):
    """A step after which every weight and every moment is its number."""
    with torch.no_grad():
        for weight, state in engine.deepspeed.optimizer.state.items():
            for tensor in (weight, state["exp_avg"], state["exp_avg_sq"]):
                tensor.fill_(step)


def save_on(out, background, first, last):
    saver, engine = begin(out, background)
    for step in range(first, last + 1):
        train_one(engine, step)
        saver.save(engine, step, {"step": step})
    saver.wait()


def whole(out):
    """The step that `latest` names, after everything in it was compared with what it must be."""
    config = configuration(out, "false")
    state = read_state(config)
    checkpoint = folder(config) / f"step{state['step']}"
    assert damage(checkpoint, state, state["files"]) is None
    pieces = Pieces(checkpoint / name for name in state["files"])
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        assert (pieces.read(kind, "weight", 0, WIDTH * WIDTH) == state["step"]).all()
    assert state["cursor"] == {"step": state["step"]}
    return state["step"]


def newest(out):
    path = out / "checkpoints" / "latest"
    return int(path.read_text().removeprefix("step")) if path.exists() else 0


@pytest.mark.parametrize("background", ["false", "true"])
def test_sigkill_at_any_moment_of_writing_leaves_the_newest_whole_checkpoint(tmp_path, background):
    out, moments = tmp_path / "out", random.Random(background)
    out.mkdir()
    home, at, amid = out / "checkpoints", 0, 0
    for _ in range(8):
        process = fork(save_on, out, background, at + 1, 99999)
        while newest(out) <= at and process.is_alive():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        assert process.is_alive()
        process.kill()
        process.join()
        left = {path.name for path in home.iterdir()} - {"latest"}
        amid += not all(name.startswith("step") for name in left)
        before, at = at, whole(out)
        assert at > before
    print(f"of 8 kills {amid} left something half written")
    assert amid >= 2
    process = fork(save_on, out, background, at + 1, at + 3)
    process.join()
    assert process.exitcode == 0 and whole(out) == at + 3
    assert {path.name for path in home.iterdir()} == {"latest", f"step{at + 2}", f"step{at + 3}"}


def fill_disk(out, background):
    """Files can't grow beyond some bytes: what the disk says when it is full comes from the system itself."""
    saver, engine = begin(out, background)
    train_one(engine, 1)
    saver.save(engine, 1, {"step": 1})
    saver.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    train_one(engine, 2)
    with pytest.raises(
        ValueError, match=r"step 2 couldn't be written .*rank 0: .*too large.*ones before it .*untouched"
    ):
        saver.save(engine, 2, {"step": 2})
        saver.wait()
    assert whole(out) == 1 and not [*(out / "checkpoints").glob(".*")]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    train_one(engine, 3)
    saver.save(engine, 3, {"step": 3})
    saver.wait()


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_is_told_in_one_paragraph_and_leaves_the_checkpoints_before(tmp_path, background):
    out = tmp_path / "out"
    out.mkdir()
    process = fork(fill_disk, out, background)
    process.join()
    assert process.exitcode == 0 and whole(out) == 3
