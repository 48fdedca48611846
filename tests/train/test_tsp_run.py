"""Training with weights and tokens sharded over the same ranks: one process's numbers, checkpoints for any topology."""

import json
import shutil

import pytest
import torch

from hsap.models import ModelConfig, build_model
from hsap.models.huggingface import save
from hsap.models.llama import shapes
from hsap.models.tsp.traffic import weight_traffic
from hsap.train.checkpoints.export import Exported
from tests.parity import Case, arguments, compare, write_data
from tests.parity.rank import configure
from tests.train.worlds import run_world

pytestmark = pytest.mark.slow
NINE = (9, 3)
STEPS = 4
ALONE = [Case("1x1", zero_stage=0), Case("1x1", zero_stage=0, heads=NINE)]
SHARDED = [
    Case("4x1", zero_stage=1, planner="zigzag", micro_packs=2, tsp_axis="all"),
    Case("4x1", zero_stage=0, planner="zigzag", tsp_axis="all"),
    Case("2x2", zero_stage=1, planner="sap", tsp_axis="intra", heads=NINE),
    Case("2x1", dp=2, zero_stage=1, planner="zigzag", micro_packs=1, tsp_axis="all"),
]
RESUMED = [(0, ALONE[0]), (2, ALONE[1]), ("alone0", SHARDED[3]), ("alone1", SHARDED[2])]
"""The run whose second step's checkpoint is gone on from, and how."""
BF16 = Case("4x1", zero_stage=1, planner="zigzag", tsp_axis="all", dtype="bf16")


def steps(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one process and of four, and runs that go on from the other's checkpoints."""
    root = tmp_path_factory.mktemp("tsp")
    data = write_data(root)
    saving = ["train.save_every=2", "train.keep=9", f"data.eval_path={data}", "train.eval_every=4", "optim.clip=0.1"]

    def told(case, name, *more):
        return [*arguments(case, data, root / name, STEPS), *saving, *more]

    def resumed(is_alone):
        """What ranks of that number go on with, from copies of runs that have ended."""
        chosen = [i for i, (_, case) in enumerate(RESUMED) if (case in ALONE) == is_alone]
        for i in chosen:
            shutil.copytree(root / f"{RESUMED[i][0]}", root / f"resumed{i}")
            (root / f"resumed{i}" / "checkpoints" / "latest").write_text("step2")
        return [told(RESUMED[i][1], f"resumed{i}", "resume=true") for i in chosen]

    run_world(1, [told(case, f"alone{i}") for i, case in enumerate(ALONE)], root)
    sharded = [told(case, f"{i}") for i, case in enumerate(SHARDED)]
    config = configure(told(SHARDED[0], "folder"), 4)
    model = ModelConfig.from_mapping({key: value for key, value in config.model.items() if key != "from"})
    save(build_model(model, config.train.seed), root / "folder", max_positions=512)
    given = told(SHARDED[0], "given", f"model.from={root / 'folder'}")
    run_world(4, [*sharded, told(BF16, "bf16"), given, *resumed(False)], root)
    run_world(1, resumed(True), root)
    return root


@pytest.mark.parametrize("index", range(len(SHARDED)), ids=[case.name for case in SHARDED])
def test_gradients_loss_and_norm_are_one_process_s(runs, index):
    base = runs / f"alone{ALONE.index(SHARDED[index].base)}"
    difference = compare(base, runs / f"{index}")
    assert difference.ok, difference
    assert all(step["grad_norm"] > 0.1 for step in steps(base)), "every step is clipped"
    evaluated = [steps(out)[-1]["eval_loss"] for out in (base, runs / f"{index}")]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)


@pytest.mark.parametrize("index", range(len(SHARDED)), ids=[case.name for case in SHARDED])
def test_weights_send_what_their_shape_says(runs, index):
    """Every step the same, whatever its tokens: counted where it is sent, and from the model's shape alone."""
    case, config = SHARDED[index], Exported.open(runs / f"{index}").config
    inter, intra = map(int, case.topology.split("x"))
    degree = intra if case.tsp_axis == "intra" else inter * intra
    micro_step = sum(weight_traffic(config, degree, rank, 4, 4).total() for rank in range(degree))
    micro_steps = 4 // case.micro_packs  # of all SP groups
    groups = inter * intra // degree
    assert [step["weight_bytes"] for step in steps(runs / f"{index}")] == [groups * micro_steps * micro_step] * STEPS


def test_weights_come_from_a_folder_too(runs):
    """The folder has those that the seed gives: the same run, bit for bit."""
    wanted, got = ([step["loss"] for step in steps(runs / name)] for name in ("0", "given"))
    assert got == wanted


def test_bf16_is_near(runs):
    wanted, got = ([step["loss"] for step in steps(runs / name)] for name in ("alone0", "bf16"))
    assert got == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("index", range(len(RESUMED)), ids=[f"{a} to {b.name}" for a, b in RESUMED])
def test_a_checkpoint_is_of_no_topology(runs, index):
    """Sharded runs go on as one process, and one process as sharded runs."""
    wanted, got = (steps(runs / name) for name in (f"{RESUMED[index][0]}", f"resumed{index}"))
    assert [step["step"] for step in got] == [1, 2, 3, 4]
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in wanted], rel=1e-5)


@pytest.mark.parametrize("name", ["0", "3", "2"])
def test_whole_parameters_are_exported(runs, name):
    base = runs / ("alone1" if name == "2" else "alone0")
    wanted, got = Exported.open(base), Exported.open(runs / name)
    for parameter, like in shapes(wanted.config).items():
        whole = got.parameter(parameter)
        assert whole.shape == like.shape
        torch.testing.assert_close(whole, wanted.parameter(parameter), rtol=0, atol=2e-4)
