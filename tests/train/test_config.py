from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from hsap import clusters
from hsap.data.packing import WINDOW, Packing
from hsap.train.attention import kernel_options
from hsap.train.config import train_config
from hsap.train.groups import EngineConfig, PlannerConfig
from hsap.train.overrides import GROUPS, know_project, rewrite

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
know_project(CONFIGS.parent)


def values(*overrides):
    """Compose as train.py does, with a model group of the tests' own."""
    own = f"hydra.searchpath=[file://{Path(__file__).parent}/configs]"
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", [own, "model=stand_in", *rewrite(overrides)])
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def build(*overrides, world_size=8, device="cpu"):
    return train_config(values(*overrides), world_size, device, "outputs/x")


def test_the_defaults_are_a_complete_demo():
    config = build("+topology=4x2")
    assert (config.topology, config.inter_sp, config.intra_sp, config.dp) == ("4x2", 4, 2, 1)
    assert config.planner == PlannerConfig("sap", {})
    assert config.engine == EngineConfig(zero_stage=1, dtype="fp32", device="cpu", backend="gloo")
    assert config.wire_dtype == "fp32"
    assert config.accumulation == config.train.packs_per_step == 2
    assert config.optim.betas == (0.9, 0.95)
    assert config.out == "outputs/x"
    with pytest.raises(FrozenInstanceError):
        config.out = "elsewhere"


def test_every_key_of_the_contract_can_be_set():
    config = build(
        *(
            "topology=2x1",
            "planner=zigzag",
            "planner.balance=blocks",
            "planner.window=3",
            "data.path=a",
            "data.lookahead=5",
            "data.workers=3",
        ),
        *("data.tokenizer=t", "data.pack_tokens=77", "data.packing=concat", "data.eval_path=null", "train.steps=9"),
        *(
            "data.long_documents=keep",
            "data.max_document_tokens=999",
            "data.max_delay_steps=5",
            "data.curriculum=[[9,99]]",
        ),
        *("train.seed=7", "train.packs_per_step=24", "train.micro_packs=2", "train.eval_every=0", "train.save_every=3"),
        *("train.keep=1", "engine.zero_stage=3", "engine.dtype=bf16", "engine.device=cuda", "optim.lr=1", "out=o"),
        *("optim.clip=null", "resume=true", "kernel=math", "wire_dtype=fp32", "arena_multiple=2", "verify=false"),
        *("profile.steps=[10,20]", "profile.layers=[0,3]"),
        device="cuda",
    )
    assert config.planner == PlannerConfig("zigzag", {"balance": "blocks", "window": 3})
    assert (config.data.path, config.data.tokenizer, config.data.eval_path) == ("a", "t", None)
    assert (config.data.pack_tokens, config.data.packing) == (77, "concat")
    assert (config.data.lookahead, config.data.workers) == (5, 3)
    assert config.packing == Packing(77, "concat", WINDOW, "keep", 999, 5, ((9, 99),))
    assert (config.train.steps, config.train.seed, config.train.save_every, config.train.keep) == (9, 7, 3, 1)
    assert (config.dp, config.train.micro_packs, config.accumulation) == (4, 2, 3)
    assert config.engine == EngineConfig(3, "bf16", "cuda", "nccl")
    assert isinstance(config.optim.lr, float)
    assert (config.optim.lr, config.optim.clip) == (1.0, None)
    assert (tuple(config.profile.steps), tuple(config.profile.layers)) == ((10, 20), (0, 3))
    assert (config.resume, config.kernel, config.wire_dtype, config.verify) == (True, "math", "fp32", False)


def test_workers_plan_where_ranks_don_t_compute_on_the_same_cores():
    assert build().data.workers == 0 and build(device="cuda").data.workers == 2
    assert build("data.workers=0", device="cuda").data.workers == 0
    with pytest.raises(ValueError, match=r"data\.workers=-1"):
        build("data.workers=-1")


def test_no_topology_means_one_outer_layer_over_all_ranks():
    assert build(world_size=6).topology == "6x1"
    assert build(world_size=1).topology == "1x1"


def test_the_command_line_wins_over_an_experiment():
    assert build("+experiment=smoke").train.steps == 3
    assert build("+experiment=smoke", "train.steps=5").train.steps == 5
    long = build("+experiment=long-context", "topology=8x1", device="cuda")
    assert (long.topology, long.data.pack_tokens, long.engine.dtype, long.cluster.name) == (
        *("8x1", 131072, "bf16", "dgx-a100"),
    )


def test_a_cluster_is_a_file_of_its_group_and_every_field_a_key():
    assert build("cluster=p4de").cluster == clusters.read("p4de")
    assert build("cluster=p4de", "cluster.num_nics=8").cluster.num_nics == 8
    assert build().cluster == clusters.read("cpu-gloo")
    assert build(device="cuda").cluster == clusters.read("dgx-a100")
    small = build("cluster.ranks_per_node=4", "+cluster.comm_share=0.2", device="cuda").cluster
    assert (small.name, small.ranks_per_node, small.comm_share) == ("dgx-a100", 4, 0.2)
    with pytest.raises(ValueError, match="cluster: 'preset' is no field of a cluster"):
        build("+cluster.preset=p4de")


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_name_that_a_group_lacks_is_refused_and_those_it_has_are_told(group, plus):
    with pytest.raises(MissingConfigException) as refused:
        values(f"{plus}{group}=nonsense")
    told = str(refused.value)
    assert f"Could not find '{group}/nonsense'" in told
    assert all(path.stem in told for path in (CONFIGS / group).glob("*.yaml"))


def test_every_group_but_planner_is_known_to_overrides():
    assert sorted(GROUPS) == sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "planner")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.step=3", r"train\.step: no such key; .*Did you mean train\.steps\?"),
        ("+stepz=3", r"^stepz: no such key; known ones are .*data.*topology"),
        ("profile.steps=10", r"profile\.steps=10: expected the first step and the one after the last, like \[10,20\]"),
        ("profile.steps=[10,10]", r"profile\.steps=\[10, 10\]: expected the first step"),
        ("profile.steps=[0,3]", r"profile\.steps=\[0, 3\]: expected the first step"),
        ("profile.steps=[1,2,3]", r"profile\.steps=\[1, 2, 3\]: expected the first step"),
        ("profile.layers=[]", r"profile\.layers=\[\]: expected indices of layers, like \[0,1\], or null"),
        ("profile.layers=[-1]", r"profile\.layers=\[-1\]: expected indices of layers"),
        ("profile.step=[1,2]", r"profile\.step: no such key; .*Did you mean profile\.steps\?"),
        ("train.steps=0", r"train\.steps=0: expected a whole number of at least 1"),
        ("train.steps=1.5", r"train\.steps=1\.5: expected a whole number"),
        ("train.steps=true", r"train\.steps=True: expected a whole number"),
        ("train.steps=many", r"train\.steps=many: expected a whole number"),
        ("train.seed=-1", r"train\.seed=-1: expected a whole number of at least 0"),
        ("train.eval_packs=0", r"train\.eval_packs=0: .*or null"),
        ("optim.lr=0", r"optim\.lr=0: expected a number above 0"),
        ("optim.lr=nan", r"optim\.lr=nan: expected a number above 0"),
        ("optim.lr=inf", r"optim\.lr=inf"),
        ("optim.lr=fast", r"optim\.lr=fast: expected a number above 0"),
        ("optim.betas=[0.9]", r"optim\.betas=\[0\.9\]: expected two numbers"),
        ("optim.betas=[0.9,1.0]", r"optim\.betas=.*expected two numbers"),
        ("optim.min_lr_ratio=1.5", r"optim\.min_lr_ratio=1\.5: expected a number from 0 to 1"),
        ("engine.zero_stage=4", r"engine\.zero_stage=4: expected one of 0, 1, 2, 3"),
        ("engine.zero_stage=true", r"engine\.zero_stage=True: expected one of"),
        ("engine.dtype=fp8", r"engine\.dtype=fp8: expected one of fp32, bf16"),
        ("engine.device=tpu", r"engine\.device=tpu: expected one of cpu, cuda, or null"),
        ("engine.backend=nccl", r"engine\.backend=nccl needs engine\.device=cuda"),
        ("data.packing=worst_fit", r"data\.packing=worst_fit: expected one of best_fit, balanced, concat"),
        (
            "data.curriculum=[5,99]",
            r"data\.curriculum=\[5, 99\]: expected a list of \[step, pack_tokens\], like .*or null",
        ),
        ("data.loss=user", r"data\.loss=user: expected one of assistant, last_assistant, weighted, all"),
        ("data.answers=worst", r"data\.answers=worst: expected one of all, best"),
        ("data.trees=some", r"data\.trees=some: expected one of all, best"),
        ("data.chat_date=today", r"data\.chat_date=today: expected a day, like '2024-07-26'"),
        ("data.chat_fields={messages: 3}", r"data\.chat_fields=.*: expected names of fields, like {messages: talk}"),
        ("data.chat_template=''", r"data\.chat_template=: expected chatml, llama2, mistral, or a file, or null"),
        ("data.path=null", r"data\.path=None: expected a file or a directory"),
        ("data.tokenizer=''", r"data\.tokenizer="),
        ("data=null", r"data=None: expected a group of keys"),
        ("wire_dtype=fp16", r"wire_dtype=fp16: expected one of fp32, bf16, or null"),
        ("verify=1", r"verify=1: expected true or false"),
        ("resume=true", r"resume=true needs out=DIR"),
        ("topology=[4,2]", r"topology=\[4, 2\]: expected NxM"),
        ("planner=null", r"planner=None: expected the name of a planner"),
        ("planner.order=[1,2]", r"planner\.order=\[1, 2\]: a planner's option is"),
        ("~train.keep", r"train\.keep is missing"),
    ],
)
def test_bad_values_name_the_key_and_what_is_allowed(override, told):
    with pytest.raises(ValueError, match=told) as error:
        train_config(
            values("model=stand_in", override) if override != "data=null" else {**values(), "data": None},
            8,
            "cpu",
            "outputs/x",
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("packs", "micro", "topology", "fits"),
    [
        (6, 1, "2x1", "multiple of 4. Nearest that fit: 4 or 8."),
        (
            3,
            2,
            "8x1",
            "multiple of 2. Nearest that fit: 2 or 4, or with train.packs_per_step=3 train.micro_packs=1 or 3.",
        ),
        (8, 3, "2x1", "multiple of 12. Nearest that fit: 12, or with train.packs_per_step=8 train.micro_packs=1 or 2."),
        (1, 1, "1x1", "multiple of 8. Nearest that fit: 8."),
    ],
)
def test_packs_that_do_not_divide_are_told_what_would(packs, micro, topology, fits):
    with pytest.raises(ValueError, match=f"train.packs_per_step={packs} doesn't divide") as error:
        build(f"topology={topology}", f"train.packs_per_step={packs}", f"train.micro_packs={micro}")
    assert fits in str(error.value)


def test_weights_are_sharded_over_the_group_or_its_intra_axis():
    assert build("+topology=4x2").tsp_degree == 1
    assert build("+topology=4x2", "parallel=tsp").tsp_degree == 8
    assert build("+topology=4x2", "parallel=tsp", "tsp_axis=intra").tsp_degree == 2
    assert build("+topology=2x2", "parallel=tsp").tsp_degree == 4, "beside dp"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("+topology=8x1", "tsp_axis=intra"), r"topology=8x1 and tsp_axis=intra shards weights over one rank only"),
        (("engine.zero_stage=2",), r"engine\.zero_stage=2 with parallel=tsp: .*only stages 0 and 1"),
        (
            ("engine.zero_stage=0", "engine.dtype=bf16"),
            r"engine\.zero_stage=0 with engine\.dtype=bf16 and parallel=tsp",
        ),
        (("profile.steps=[1,2]",), r"profile\.steps with parallel=tsp"),
        (("train.pad_rows=true",), r"train\.pad_rows=true with parallel=tsp"),
        (("parallel=sp", "tsp_axis=intra"), r"tsp_axis=intra with parallel=sp does nothing"),
        (("tsp_axis=inter",), r"tsp_axis=inter: expected one of intra, all"),
        (("parallel=tp",), r"parallel=tp: expected one of sp, tsp"),
    ],
)
def test_what_isn_t_there_beside_tsp_is_refused(overrides, told):
    with pytest.raises(ValueError, match=told):
        build("+topology=4x2", "parallel=tsp", *overrides)


def test_what_only_gpus_have_is_set_there_alone():
    settings = ("engine.comm_ctas=4", "profile.nvtx=true", "deterministic_backward=true")
    config = build(*settings, device="cuda")
    assert (config.engine.comm_ctas, config.profile.nvtx, config.deterministic_backward) == (4, True, True)
    assert kernel_options(config) == {"output": "native", "deterministic": True}
    default = build()
    assert (default.engine.comm_ctas, default.profile.nvtx) == (None, False)
    assert kernel_options(default) == {"output": "float32", "deterministic": False}
    for overrides, words in (
        (["engine.comm_ctas=4"], r"engine\.comm_ctas=4 limits what NCCL takes .* engine\.backend is gloo"),
        (["engine.comm_ctas=0"], r"engine\.comm_ctas=0: expected a whole number of at least 1, or null"),
        (["profile.nvtx=true"], r"profile\.nvtx=true names instructions to a profiler of GPUs, and engine\.device is"),
    ):
        with pytest.raises(ValueError, match=words):
            build(*overrides)
