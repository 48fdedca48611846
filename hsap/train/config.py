"""The training configuration: frozen values, checked key by key against what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hsap import clusters
from hsap.data.config import DataConfig
from hsap.data.packing import check_dealing
from hsap.data.packing.settings import Packing
from hsap.ir.problem import Cluster, Topology
from hsap.keys import choice, flag, number, read, text
from hsap.train.groups import (
    CheckConfig,
    EngineConfig,
    GuardConfig,
    LoopConfig,
    OptimConfig,
    PlannerConfig,
    ProfileConfig,
)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything that a run needs, complete and checked against the number of ranks.

    topology: "4x2" is inter_sp=4, intra_sp=2. model: the composed model group as it is, for the model's own check. dp:
    SP groups that share a step's packs; accumulation: micro-steps of a step. cluster: the machines as the planner sees
    them. out: the run's directory. packing: how documents become packs, from the settings of data.
    """

    data: DataConfig
    packing: Packing
    planner: PlannerConfig
    cluster: Cluster
    engine: EngineConfig
    optim: OptimConfig
    train: LoopConfig
    profile: ProfileConfig
    check: CheckConfig
    guard: GuardConfig
    model: Mapping[str, object]
    topology: str
    kernel: str
    deterministic_backward: bool
    wire_dtype: str
    arena_multiple: float
    verify: bool
    out: str
    resume: bool
    parallel: str
    tsp_axis: str
    world_size: int
    dp: int
    accumulation: int

    @property
    def inter_sp(self) -> int:
        return Topology.parse(self.topology).inter_sp

    @property
    def intra_sp(self) -> int:
        return Topology.parse(self.topology).intra_sp

    @property
    def tsp_degree(self) -> int:
        """Neighbouring ranks that share one copy of the weights; 1 without TSP."""
        if self.parallel == "sp":
            return 1
        return self.intra_sp if self.tsp_axis == "intra" else self.inter_sp * self.intra_sp


@dataclass(frozen=True, slots=True)
class _PlainKeys:
    """The keys of the configuration that stand in no group."""

    topology: str | None = text("NxM, like 4x2", optional=True)
    kernel: str = text("the name of a kernel, or auto")
    wire_dtype: str | None = choice("fp32", "bf16", optional=True)
    arena_multiple: float = number("a number above 0", lambda v: v > 0)
    verify: bool = flag()
    out: str | None = text("a directory", optional=True)
    resume: bool = flag()
    parallel: str = choice("sp", "tsp")
    tsp_axis: str = choice("intra", "all")
    deterministic_backward: bool = flag(default=False)


GROUPS = {
    "data": DataConfig,
    "engine": EngineConfig,
    "optim": OptimConfig,
    "train": LoopConfig,
    "profile": ProfileConfig,
    "check": CheckConfig,
    "guard": GuardConfig,
}
"""Groups of keys that are read by themselves; what needs more than a group to be judged is judged by `train_config`."""
_NEWER = ("check", "guard")
"""Groups that a configuration kept by an earlier version doesn't have."""
_OTHER_GROUPS = ("model", "planner", "cluster")
KEYS = {*GROUPS, *_OTHER_GROUPS} | {f.name for f in fields(_PlainKeys)}
"""What a configuration has at its top."""

# On CPUs ranks compute on the very cores that workers would plan on.
_WORKERS = {"cpu": 0, "cuda": 2}


def train_config(values: Mapping[str, object], world_size: int, device: str, out: str) -> TrainConfig:
    """Check the composed configuration against what is allowed and against the ranks that will run it.

    values: nested plain mappings. device: "cpu" or "cuda". ValueError names the key, its value and what is allowed.
    """
    plain_values = {key: value for key, value in values.items() if key not in (*GROUPS, *_OTHER_GROUPS)}
    plain = read(_PlainKeys, "", plain_values, KEYS)
    values = {**{name: {} for name in _NEWER}, **values}
    groups: dict[str, Any] = {name: read(kind, f"{name}.", _section(values, name)) for name, kind in GROUPS.items()}
    topology = plain.topology or f"{world_size}x1"
    dp, rest = divmod(world_size, Topology.parse(topology).num_ranks)
    assert dp >= 1 and rest == 0, "the launcher checks the world size first"
    engine = groups["engine"]
    backend = engine.backend or ("nccl" if device == "cuda" else "gloo")
    if backend == "nccl" and device == "cpu":
        raise ValueError("engine.backend=nccl needs engine.device=cuda; with engine.device=cpu use gloo or null.")
    if engine.comm_ctas is not None and backend != "nccl":
        raise ValueError(
            f"engine.comm_ctas={engine.comm_ctas} limits what NCCL takes of a GPU, and here engine.backend is "
            f"{backend}; set engine.comm_ctas=null, or run on GPUs."
        )
    if groups["profile"].nvtx and device != "cuda":
        raise ValueError(
            "profile.nvtx=true names instructions to a profiler of GPUs, and engine.device is cpu; set "
            "profile.nvtx=false (profile.steps measures on CPUs too)."
        )
    if plain.resume and plain.out is None:
        raise ValueError("resume=true needs out=DIR, the directory of the run whose checkpoint is to be resumed.")
    groups["engine"] = replace(engine, device=device, backend=backend)
    if groups["data"].workers is None:
        groups["data"] = replace(groups["data"], workers=_WORKERS[device])
    made = TrainConfig(
        **groups,
        packing=groups["data"].as_packing(),
        planner=_planner(_section(values, "planner")),
        cluster=_cluster(_section(values, "cluster"), device),
        model=_section(values, "model"),
        topology=topology,
        kernel=plain.kernel,
        deterministic_backward=plain.deterministic_backward,
        wire_dtype=plain.wire_dtype or engine.dtype,
        arena_multiple=float(plain.arena_multiple),
        verify=plain.verify,
        out=out,
        resume=plain.resume,
        parallel=plain.parallel,
        tsp_axis=plain.tsp_axis,
        world_size=world_size,
        dp=dp,
        accumulation=_accumulation(groups["train"], dp),
    )
    _check_guard(made.guard)
    if made.parallel == "tsp":
        _check_tsp(made)
    elif made.tsp_axis != "all":
        raise ValueError(
            f"tsp_axis={made.tsp_axis} with parallel={made.parallel} does nothing: only parallel=tsp shards "
            "weights over an axis; set that too, or leave tsp_axis out"
        )
    return made


def _check_guard(guard: GuardConfig) -> None:
    """Refuse settings that do nothing together."""
    if guard.spike is None and guard.on_spike != "warn":
        raise ValueError(
            f"guard.on_spike={guard.on_spike} with guard.spike=null does nothing: no leap is looked for; set "
            "guard.spike too, as in guard.spike=6, or leave guard.on_spike out"
        )


def _check_tsp(config: TrainConfig) -> None:
    """Refuse what isn't there beside tensor and sequence parallelism."""
    engine = config.engine
    if config.tsp_degree == 1:
        raise ValueError(
            f"parallel=tsp with topology={config.topology} and tsp_axis={config.tsp_axis} shards weights over one rank "
            "only; set tsp_axis=all, a topology with more ranks, or parallel=sp"
        )
    if engine.zero_stage > 1:
        raise ValueError(
            f"engine.zero_stage={engine.zero_stage} with parallel=tsp: the weights and their gradients are sharded "
            "already, and only stages 0 and 1 go beside it; set engine.zero_stage=1 or parallel=sp"
        )
    if engine.zero_stage == 0 and engine.dtype == "bf16":
        raise ValueError(
            "engine.zero_stage=0 with engine.dtype=bf16 and parallel=tsp: DeepSpeed's optimizer for that can't count "
            "copies of a parameter once in the gradient's norm; set engine.zero_stage=1"
        )
    if config.train.pad_rows:
        raise ValueError("train.pad_rows=true with parallel=tsp isn't there; set train.pad_rows=false or parallel=sp")
    if config.profile.steps is not None:
        raise ValueError(
            "profile.steps with parallel=tsp: timelines of several plans in one layer can't be shown yet; set "
            "profile.steps=null or parallel=sp"
        )
    if config.guard.dumps:
        raise ValueError(
            "guard.non_finite=dump or guard.on_spike=dump with parallel=tsp: a step whose weights are sharded with its "
            "tokens can't be replayed; set stop or skip there, or parallel=sp"
        )


def _section(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = values.get(name)
    if not isinstance(section, Mapping):
        raise ValueError(f"{name}={section}: expected a group of keys; choose a file of configs/{name}/.")
    return section


def _planner(section: Mapping[str, object]) -> PlannerConfig:
    name = section.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"planner={name}: expected the name of a planner, like planner=sap.")
    options: dict[str, Any] = {key: value for key, value in section.items() if key != "name"}
    for key, value in options.items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise ValueError(f"planner.{key}={value}: a planner's option is a number, a word, true, false or null.")
    return PlannerConfig(name, options)


def _cluster(section: Mapping[str, object], device: str) -> Cluster:
    """Read the cluster's fields; those beside `name: auto` change the cluster that fits the device."""
    values = dict(section)
    if values.get("name") == clusters.CHOSEN_LATER:
        changed = {key: value for key, value in values.items() if key != "name" and value is not None}
        values = clusters.read("dgx-a100" if device == "cuda" else "cpu-gloo").to_json() | changed
    return clusters.from_mapping(values, "cluster")


def _accumulation(train: LoopConfig, dp: int) -> int:
    check_dealing(train.packs_per_step, dp, train.micro_packs)
    return train.packs_per_step // (dp * train.micro_packs)
