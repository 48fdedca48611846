"""Inputs: all of a run that can be known, and refused, before ranks are started or wait for each other."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsap.data import prepared
from hsap.data.config import OF_CHATS, OF_MIXTURES, OF_PACKS
from hsap.data.opening import marker_notice, open_data, open_template, open_tokenizer
from hsap.data.packing import count_long
from hsap.data.read import read_store
from hsap.data.store import DocumentStore
from hsap.data.tokenizer import Tokenizer
from hsap.files import sha256, short
from hsap.ir.layout import Layout
from hsap.ir.shared import check_shareable
from hsap.keys import is_number
from hsap.models import ModelConfig
from hsap.models.config import FREE
from hsap.models.huggingface import configured
from hsap.models.huggingface.tensors import Weights
from hsap.planners import check_options
from hsap.runtime.kernels import select_kernel
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train import flags
from hsap.train.attention import kernel_options, planned_heads
from hsap.train.checkpoints.folder import check_identity, read_state, refuse_used
from hsap.train.config import TrainConfig

# A template is compared by what it holds, once it is known whether any chat was made text by it.
_FIXED = (
    *(f"data.{name}" for name in (*OF_PACKS, *OF_MIXTURES, *OF_CHATS) if name != "chat_template"),
    *("train.seed", "train.packs_per_step", "engine.dtype"),
)

_DEMO_NOTICE = (
    "data.eval_path is the demo's text until set, whatever data.path is; data.eval_path=null evaluates nothing"
)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a rank trains on and with. checkpoint: state to go on from, None for a new run.

    identity: JSON values by setting, of everything that a checkpoint of this run binds later runs to. left_out: in
    words, documents of each data set that aren't used and why; empty if all are. notices: what else the run has to say
    at its start, of its data and of what the configuration changes of the model that training begins from. chats: which
    documents of train_data are, see `Index.chats`.
    """

    model: ModelConfig
    train_data: DocumentStore
    eval_data: DocumentStore | None
    identity: dict
    checkpoint: dict | None
    left_out: tuple[str, ...]
    notices: tuple[str, ...] = ()
    chats: np.ndarray | None = None


def check(config: TrainConfig) -> tuple[Tokenizer, ModelConfig]:
    """Refuse by ValueError what can be judged without reading data; gives the tokenizer and the model's shape."""
    data = config.data
    paths: list[Any] = [*_data_sets(config).values()]
    for path in paths:
        if not prepared.is_prepared(path):
            open_data(data, path, config.train.seed)
    tokenizer = open_tokenizer(data)
    if data.chat_template is not None:
        # One that merely lies beside the tokenizer is no fault of a run on plain text, whatever is wrong with it.
        open_template(data, tokenizer)
    for path in filter(prepared.is_prepared, paths):
        prepared.check_agreement(path, data, tokenizer)
    model, _ = model_shape(config, tokenizer)
    _check_way(config, model)
    if config.model.get("from") is not None and not config.resume:
        Weights(str(config.model["from"])).check(model)
    if config.profile.layers is not None and max(config.profile.layers) >= model.num_layers:
        raise ValueError(
            f"profile.layers={list(config.profile.layers)}: the model has {model.num_layers} layers, 0 to "
            f"{model.num_layers - 1}; name some of them, or null for all"
        )
    _check_out(config.out)
    check_options(config.planner.name, dict(config.planner.options))
    # The plan of nothing: already it knows whether the options' values fit, and whether the heads go round.
    for setup in planned_heads(config, model, dp_rank=0).setups:
        setup.compile(Layout.from_lengths([]))
    if config.resume:
        check_identity(read_state(config), _settings(config, model, tokenizer))
    elif os.environ.get(flags.RESTARTS, "0") == "0":  # what an earlier attempt has left there is this run's own
        refuse_used(config)
    return tokenizer, model


def _check_way(config: TrainConfig, model: ModelConfig) -> None:
    """Refuse ways of computing a model that device or ZeRO stage don't allow."""
    if model.offload_checkpoints and config.engine.device != "cuda":
        raise ValueError(
            f"model.offload_checkpoints=true moves what layers keep from a GPU to the host; with engine.device="
            f"{config.engine.device} there is no other memory to move it to: leave it off"
        )
    if model.compile and config.engine.zero_stage == 3:
        raise ValueError(
            "model.compile=true with engine.zero_stage=3: ZeRO-3 gathers weights in hooks between a layer's modules, "
            "where nothing compiles; use engine.zero_stage=2 or less, or leave model.compile off"
        )


def _check_out(out: str) -> None:
    """Refuse a folder that can't be one, before anything takes long."""
    path = Path(out).absolute()
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"out={out}: {there} is no folder that can be written to; set out= to another")


def prepare_data(config: TrainConfig) -> None:
    """Prepare raw data in the cache, before ranks are started that would wait for the first of them to do it."""
    for setting, path in _data_sets(config).items():
        if not prepared.is_prepared(path):
            with _of_the_demo(config, setting):
                prepared.cached(config.data, path, config.train.seed, setting, _who(config))


def read_inputs(config: TrainConfig) -> Inputs:
    """Check everything and read the data; every rank for itself. ValueError for what the user can mend."""
    tokenizer, model = check(config)
    check_kernel(config, model)
    read = {setting: _documents(config, setting, model) for setting in _data_sets(config)}
    train_data, index = read["data.path"]
    eval_data, _ = read.get("data.eval_path", (None, None))
    template = index.recipe["chat_template"]
    identity = {
        **_settings(config, model, tokenizer),
        "data.chat_template": None if template is None else short(template["sha256"]),
        "data.path": index.content,
    }
    told = {setting: one.left_out.told() for setting, (_, one) in read.items()}
    left_out = tuple(f"of the documents of {setting} {what}" for setting, what in told.items() if what)
    told = (marker_notice(config.data, tokenizer, one.recipe) for _, one in read.values())
    notices = tuple(dict.fromkeys(filter(None, told)))
    state = None
    if config.resume:
        state = read_state(config)
        check_identity(state, identity)
    demo = (_DEMO_NOTICE,) if "data.eval_path" in read and _evaluates_demo(config) else ()
    notices = (*model_shape(config, tokenizer)[1], *notices, *demo)
    return Inputs(model, train_data, eval_data, identity, state, left_out, notices, index.chats)


def check_kernel(config: TrainConfig, model: ModelConfig) -> None:
    """Refuse an attention kernel that can't do what is asked on the device of this process."""
    dtype = TORCH_DTYPES[config.engine.dtype]
    select_kernel(
        config.kernel, config.engine.device or "cpu", dtype, head_dim=model.head_dim, **kernel_options(config)
    )


def model_shape(config: TrainConfig, tokenizer: Tokenizer) -> tuple[ModelConfig, tuple[str, ...]]:
    """Make the model's config, from the folder of `model.from` if there is one; also what it changes of that one's."""
    if config.model.get("from") is not None:
        return configured(config.model, tokenizer.vocab_size)
    values = {key: value for key, value in config.model.items() if key != "from"}
    return ModelConfig.from_mapping(values, tokenizer.vocab_size), ()


def _data_sets(config: TrainConfig) -> dict[str, str | Sequence[str] | Mapping[str, float]]:
    """Give the data sets of a run by the settings that name them; data.eval_path only where it is evaluated."""
    data = config.data
    evaluated = data.eval_path is not None and config.train.eval_every
    held_out = {} if data.eval_path is None or not evaluated else {"data.eval_path": data.eval_path}
    return {"data.path": data.path, **held_out}


def _evaluates_demo(config: TrainConfig) -> bool:
    """Whether a run on data of its own is evaluated on the demo's, as it is until data.eval_path is set."""
    path, held_out = config.data.path, config.data.eval_path
    return (
        held_out is not None
        and Path(held_out).parts[-3:] == ("datasets", "demo", "eval.jsonl.gz")
        and not (isinstance(path, str) and Path(path).parent == Path(held_out).parent)
    )


@contextmanager
def _of_the_demo(config: TrainConfig, setting: str) -> Iterator[None]:
    """Where the demo's held-out text can't be read as a run's own data are, say whose it is."""
    try:
        yield
    except ValueError as error:
        if setting != "data.eval_path" or not _evaluates_demo(config):
            raise
        raise ValueError(f"{error}; {_DEMO_NOTICE}") from error


def _who(config: TrainConfig) -> str:
    rank = os.environ.get("RANK")
    return "hsap" if rank is None or config.world_size == 1 else f"hsap: rank {rank}"


def _documents(config: TrainConfig, setting: str, model: ModelConfig) -> tuple[DocumentStore, prepared.Index]:
    """Read the data set that a setting names."""
    with _of_the_demo(config, setting):
        store, index = read_store(config.data, _data_sets(config)[setting], config.train.seed, setting, _who(config))
    if store.answers is not None:
        for mask in set(model.layer_masks):
            check_shareable(mask)
    count_long(store.lengths, store.uncut, config.packing)
    return store, index


def _settings(config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer) -> dict:
    """Settings that a run keeps to its end, by name: JSON values, as a checkpoint gives them back."""
    # By what they hold and do: a file may move, and null is what it stands for.
    settings = {
        "data.tokenizer": short(sha256(tokenizer.name)),
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
    settings |= {f"model.{key}": value for key, value in shape.items() if key not in FREE}
    return json.loads(json.dumps(settings))


def _weights(path: Any) -> list[float] | None:
    """Give what share each of several data sets has, in their order; None for one. Prepared data know theirs."""
    if prepared.is_prepared(path):
        path = prepared.read_index(path).settings.get("data.path")
    if not isinstance(path, Mapping) or not all(is_number(weight) and weight > 0 for weight in path.values()):
        return None
    return [round(weight / sum(path.values()), 9) for weight in path.values()]
