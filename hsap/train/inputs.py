"""Inputs: all of a run that can be known, and refused, before ranks are started or wait for each other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hsap.data import prepared
from hsap.data.chat.template import Template
from hsap.data.opening import open_data, open_template, open_tokenizer
from hsap.data.packing import count_long
from hsap.data.read import read_store
from hsap.data.store import DocumentStore
from hsap.data.tokenise import Tokenizer
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import distinct_masks
from hsap.ir.problem import Problem, Topology
from hsap.ir.shared import check_shareable
from hsap.models import ModelConfig
from hsap.planners import check_options
from hsap.runtime.kernels import select_kernel
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train.checkpoints.folder import check_identity, read_state, refuse_used
from hsap.train.config import TrainConfig
from hsap.train.recipe import PlanningSetup

_FIXED = (
    "data.pack_tokens",
    "data.packing",
    "data.long_documents",
    "data.max_document_tokens",
    "data.max_delay_steps",
    "data.curriculum",
    "data.exhausted",
    "data.loss",
    "data.answers",
    "data.trees",
    "data.chat_date",
    "train.seed",
    "train.packs_per_step",
    "engine.dtype",
)
_FREE_OF_MODEL = ("checkpointing", "loss_chunk_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a rank trains on and with. checkpoint: state to go on from, None for a new run.

    identity: JSON values by setting, of everything that a checkpoint of this run binds later runs to. left_out: in
    words, documents of each data set that aren't used and why; empty if all are.
    """

    model: ModelConfig
    train_data: DocumentStore
    eval_data: DocumentStore | None
    identity: dict
    checkpoint: dict | None
    left_out: tuple[str, ...]


def check(config: TrainConfig) -> tuple[Tokenizer, ModelConfig]:
    """Refuse by ValueError what can be judged without reading data; gives the tokenizer and the model's shape."""
    data = config.data
    paths = [data.path, data.eval_path] if data.eval_path is not None and config.train.eval_every else [data.path]
    for path in paths:
        if not prepared.is_prepared(path):
            open_data(data, path, config.train.seed)
    tokenizer = open_tokenizer(data)
    if data.chat_template is not None:
        # One that merely lies beside the tokenizer is no fault of a run on plain text, whatever is wrong with it.
        open_template(data, tokenizer)
    for path in filter(prepared.is_prepared, paths):
        prepared.check_agreement(path, data, tokenizer)
    model = ModelConfig.from_mapping(config.model, tokenizer.vocab_size)
    if config.profile.layers is not None and max(config.profile.layers) >= model.num_layers:
        raise ValueError(
            f"profile.layers={list(config.profile.layers)}: the model has {model.num_layers} layers, 0 to "
            f"{model.num_layers - 1}; name some of them, or null for all"
        )
    _check_out(config.out)
    check_options(config.planner.name, dict(config.planner.options))
    # The plan of nothing: already it knows whether the options' values fit, and whether the heads go round.
    planning_setup(config, model, dp_rank=0).compile(Layout.from_lengths([]))
    if config.resume:
        check_identity(read_state(config), _settings(config, model, tokenizer))
    else:
        refuse_used(config)
    return tokenizer, model


def _check_out(out: str) -> None:
    """Refuse a folder that can't be one, before anything takes long."""
    path = Path(out).absolute()
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"out={out}: {there} is no folder that can be written to; set out= to another")


def read_inputs(config: TrainConfig) -> Inputs:
    """Check everything and read the data; every rank for itself. ValueError for what the user can mend."""
    tokenizer, model = check(config)
    dtype = TORCH_DTYPES[config.engine.dtype]
    select_kernel(config.kernel, config.engine.device, dtype, head_dim=model.head_dim, **kernel_options(config))
    templates = functools.cache(functools.partial(open_template, config.data, tokenizer))
    train_data, left_out = _documents(config, "data.path", tokenizer, model, templates)
    # One that no document has asked for may be another, or unsound.
    used = templates() if templates.cache_info().currsize else None
    eval_data = None
    if config.data.eval_path is not None and config.train.eval_every:
        eval_data, more = _documents(config, "data.eval_path", tokenizer, model, templates)
        left_out += more
    identity = {
        **_settings(config, model, tokenizer),
        "data.chat_template": None if used is None else _sha256(used.renderer.source, used.renderer.special),
        "data.path": train_data.described(),
    }
    state = None
    if config.resume:
        state = read_state(config)
        check_identity(state, identity)
    return Inputs(model, train_data, eval_data, identity, state, left_out)


def planning_setup(config: TrainConfig, model: ModelConfig, dp_rank: int) -> PlanningSetup:
    """Everything of a micro-batch's problem but its layout."""
    heads = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim, config.engine.dtype)
    topology = Topology(config.inter_sp, config.intra_sp)
    problem = Problem(
        Layout.from_lengths([]),
        heads,
        topology,
        distinct_masks(model.layer_masks)[0],
        config.cluster.starting_at(dp_rank * topology.num_ranks),
        None,
        config.arena_multiple,
        config.wire_dtype,
    )
    return PlanningSetup(problem, config.planner.name, dict(config.planner.options), config.verify)


def kernel_options(config: TrainConfig) -> dict:
    """What the attention kernel is asked for beside device, dtype and head dimension."""
    # On CPUs partial outputs in float32 cost nothing and keep bf16's error that of one device.
    return {"output": "float32" if config.engine.device == "cpu" else "native"}


def _documents(
    config: TrainConfig,
    setting: str,
    tokenizer: Tokenizer,
    model: ModelConfig,
    template: Callable[[], Template | None],
) -> tuple[DocumentStore, tuple[str, ...]]:
    """Read the data set that a setting names; also says what of it was left out, if anything was."""
    path = getattr(config.data, setting.removeprefix("data."))
    store, left_out = read_store(config.data, path, tokenizer, template, config.train.seed, model.vocab_size)
    told = left_out.told()
    if not len(store.ids):
        raise ValueError(f"{setting} gives no document: {told}; check the data")
    if store.answers is not None:
        for mask in set(model.layer_masks):
            check_shareable(mask)
    count_long(store.lengths, store.uncut, config.packing)
    return store, (f"of the documents of {setting} {told}",) if told else ()


def _settings(config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer) -> dict:
    """Settings that a run keeps to its end, by name: JSON values, as a checkpoint gives them back."""
    # By what they hold and do: a file may move, and null is what it stands for.
    settings = {
        "data.tokenizer": f"sha256 {hashlib.sha256(Path(tokenizer.name).read_bytes()).hexdigest()[:12]}",
        "data.bos": tokenizer.bos,
        "data.eos": tokenizer.eos,
        "data.add_bos": bool(tokenizer.prefix),
        "data.add_eos": bool(tokenizer.suffix),
        "weights of data.path": _weights(config.data.path),
    }
    for name in _FIXED:
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        settings[name] = value
    shape = dataclasses.asdict(model)
    settings |= {f"model.{key}": value for key, value in shape.items() if key not in _FREE_OF_MODEL}
    return json.loads(json.dumps(settings))


def _sha256(*values: object) -> str:
    """Describe JSON values in few letters."""
    return f"sha256 {hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]}"


def _weights(path: str | Mapping[str, float]) -> list[float] | None:
    """Give what share each of several data sets has, in their order; None for one."""
    if not isinstance(path, Mapping):
        return None
    return [round(weight / sum(path.values()), 9) for weight in path.values()]
