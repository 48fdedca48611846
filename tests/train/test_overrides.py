import pytest

from hsap.train import composing, launch
from hsap.train.overrides import rewrite, wants_multirun
from tests.parity import REPOSITORY


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("value", ["4x2", "1x1", "117x3", "8x1,4x2,2x4,1x8"])
def test_topology_may_be_written_with_any_number_of_pluses(plus, value):
    assert rewrite([f"{plus}topology={value}"]) == [f"++topology={value}"]


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ("planner=zigzag", "++planner.name=zigzag"),
        ("+planner=a_planner_of_tomorrow", "++planner.name=a_planner_of_tomorrow"),
        ("planner=ring,sap", "++planner.name=ring,sap"),
        ("planner.balance=blocks", "++planner.balance=blocks"),
        ("+planner.window=3", "++planner.window=3"),
        ("train.stepz=3", "++train.stepz=3"),
        ("data.path=a=b", "++data.path=a=b"),
        ("data.path=line one\nline two", "++data.path=line one\nline two"),
        ("model=tiny", "model=tiny"),
        ("+experiment=smoke", "experiment=smoke"),
        ("++experiment=smoke", "experiment=smoke"),
        ("+cluster=p4de", "cluster=p4de"),
        ("++engine=bf16", "engine=bf16"),
        ("+trainer=x", "+trainer=x"),
        ("~data.eval_path", "~data.eval_path"),
        ("hydra.launcher._target_=x", "hydra.launcher._target_=x"),
        ("out=outputs/topology=1x1", "out=outputs/topology=1x1"),
        ("optim@other=adamw", "optim@other=adamw"),
    ],
)
def test_overrides_become_what_hydra_parses(written, parsed):
    assert rewrite([written]) == [parsed]
    assert rewrite([parsed]) == [parsed]


@pytest.mark.parametrize("flag", [["--local_rank=3"], ["--local-rank=3"], ["--local_rank", "3"], ["--local-rank", "3"]])
def test_what_launchers_insert_is_taken_out(flag):
    assert rewrite([*flag, "model=tiny", "train.steps=3"]) == ["model=tiny", "++train.steps=3"]
    assert rewrite(["model=tiny", *flag]) == ["model=tiny"]


def test_flags_between_overrides_go_last_with_their_values():
    written = [
        "model=tiny",
        "--multirun",
        "+topology=2x1",
        "--config-dir=mine",
        "~data.eval_path",
        "--cfg",
        "job",
        "out=a",
    ]
    overrides = ["model=tiny", "++topology=2x1", "~data.eval_path", "out=a"]
    assert rewrite(written) == [*overrides, "--multirun", "--config-dir=mine", "--cfg", "job"]


@pytest.mark.parametrize("argument", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_a_sweep_is_recognised(argument):
    assert wants_multirun(["model=tiny", argument])
    assert not wants_multirun(["model=tiny", "out=-m"])


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("experiment=null", "^experiment=null: expected .* experiment: long-context, smoke, smollm2;"),
        ("++engine=3", "^engine=3: expected .* engine: bf16, default;"),
        ("out=ü/(1)", r"out=ü/\(1\).*in quotes"),
        ("optim.betas=(0.9,0.95)", "in quotes"),
    ],
)
def test_what_hydra_can_t_take_is_told_in_a_paragraph(argument, told):
    with pytest.raises(ValueError, match=told) as raised:
        composing.composed(REPOSITORY / "configs", rewrite([argument]))
    assert launch.is_message(raised.value)
