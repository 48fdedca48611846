"""Inputs: all of a run that can be known, and refused, before ranks are started or wait for each other."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections import defaultdict
from dataclasses import dataclass

from hsap.data.chat.rows import ChatFields
from hsap.data.chat.template import Template, load_template
from hsap.data.pack import check_packing
from hsap.data.sources import JsonLines, list_files
from hsap.data.store import DocumentStore, tokenise_documents
from hsap.data.tokenise import Tokenizer, load_tokenizer
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import distinct_masks
from hsap.ir.problem import Problem, Topology
from hsap.ir.shared import check_shareable
from hsap.models import ModelConfig
from hsap.planners import check_options
from hsap.runtime.kernels import select_kernel
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train import checkpoint
from hsap.train.config import TrainConfig
from hsap.train.planning import PlanningSetup

_FIXED = (
    "data.pack_tokens",
    "data.packing",
    "train.seed",
    "train.packs_per_step",
    "engine.zero_stage",
    "engine.dtype",
    "world_size",
)
_FREE_OF_MODEL = ("checkpointing", "loss_chunk_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a rank trains on and with. checkpoint: state to go on from, None for a new run.

    identity: JSON values by setting, of everything that a checkpoint of this run binds later runs to. rejected: the
    places of documents that aren't trained on, by reason.
    """

    model: ModelConfig
    train_data: DocumentStore
    eval_data: DocumentStore | None
    identity: dict
    checkpoint: dict | None
    rejected: dict[str, list[str]]


def check(config: TrainConfig) -> tuple[Tokenizer, ModelConfig, Template | None]:
    """Refuse by ValueError what can be judged without reading data.

    Gives the tokenizer, the model's shape and the chat template, None where there is none.
    """
    list_files(config.data.path)
    if config.data.eval_path is not None and config.train.eval_every:
        list_files(config.data.eval_path)
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, data.add_bos, data.add_eos, data.bos, data.eos)
    template = load_template(data.chat_template, tokenizer, data.loss, datetime.date.fromisoformat(data.chat_date))
    chat_fields(config)
    model = ModelConfig.from_mapping(config.model, tokenizer.vocab_size)
    if config.profile.layers is not None and max(config.profile.layers) >= model.num_layers:
        raise ValueError(
            f"profile.layers={list(config.profile.layers)}: the model has {model.num_layers} layers, 0 to "
            f"{model.num_layers - 1}; name some of them, or null for all"
        )
    check_options(config.planner.name, dict(config.planner.options))
    # The plan of nothing: already it knows whether the options' values fit, and whether the heads go round.
    planning_setup(config, model, dp_rank=0).compile(Layout.from_lengths([]))
    if config.resume:
        checkpoint.check_identity(checkpoint.read_state(config), _settings(config, model))
    else:
        checkpoint.refuse_used(config)
    return tokenizer, model, template


def chat_fields(config: TrainConfig) -> ChatFields:
    """The fields that chats are read from, and what is taken of a row with several; ValueError for unknown ones."""
    return ChatFields.named(config.data.chat_fields, config.data.trees, config.data.answers)


def read_inputs(config: TrainConfig) -> Inputs:
    """Check everything and read the data; every rank for itself. ValueError for what the user can mend."""
    tokenizer, model, template = check(config)
    rejected: dict[str, list[str]] = {}
    dtype = TORCH_DTYPES[config.engine.dtype]
    select_kernel(config.kernel, config.engine.device, dtype, head_dim=model.head_dim, **kernel_options(config))
    train_data = _documents(config, config.data.path, tokenizer, model, template, rejected)
    eval_data = None
    if config.data.eval_path is not None and config.train.eval_every:
        eval_data = _documents(config, config.data.eval_path, tokenizer, model, template, rejected)
    identity = {**_settings(config, model), "data.path": _content(train_data)}
    state = None
    if config.resume:
        state = checkpoint.read_state(config)
        checkpoint.check_identity(state, identity)
    return Inputs(model, train_data, eval_data, identity, state, rejected)


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
    path: str,
    tokenizer: Tokenizer,
    model: ModelConfig,
    template: Template | None,
    rejected: dict[str, list[str]],
) -> DocumentStore:
    data, mine = config.data, defaultdict(list)
    source = JsonLines(path, data.text_field)

    def note(where: str, reason: str) -> None:
        mine[reason].append(where)

    store = tokenise_documents(source, tokenizer, model.vocab_size, template, data.pack_tokens, note)
    if mine and not store.ids:
        reasons = "; ".join(f"{len(places)} for {reason}, first {places[0]}" for reason, places in mine.items())
        raise ValueError(f"data set {path}: every document is rejected ({reasons}); check data.path and the data")
    if store.answers is not None:
        for mask in set(model.layer_masks):
            check_shareable(mask)
    check_packing(store.lengths, data.pack_tokens, data.packing, uncut=store.uncut)
    for reason, places in mine.items():
        rejected.setdefault(reason, []).extend(places)
    return store


def _settings(config: TrainConfig, model: ModelConfig) -> dict:
    """Settings that a run keeps to its end, by name."""
    settings = {}
    for name in _FIXED:
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        settings[name] = value
    shape = dataclasses.asdict(model)
    return settings | {f"model.{key}": value for key, value in shape.items() if key not in _FREE_OF_MODEL}


def _content(data: DocumentStore) -> str:
    """Describe data by what it holds, not by its path: it may move as long as it stays what it was."""
    digest = hashlib.sha256(data.tokens.tobytes())
    digest.update(data.starts.tobytes())
    for column in (data.trained, *(data.answers or ())):
        digest.update(b"" if column is None else column.tobytes())
    return f"{len(data.ids)} documents, {len(data.tokens)} tokens, sha256 {digest.hexdigest()[:12]}"
