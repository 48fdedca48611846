"""Loading a model from a folder and saving one into it, one tensor at a time: memory never holds two models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hsap.models.config import ModelConfig
from hsap.models.huggingface.reading import read_config
from hsap.models.huggingface.tensors import INDEX, SINGLE, Weights
from hsap.models.huggingface.writing import config_json
from hsap.models.llama import Llama, shapes
from hsap.tensorfile import write_tensors

SHARD_BYTES = 5 * 10**9


def load(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: Any = None, config: ModelConfig | None = None
) -> Llama:
    """Make the model of a folder in Hugging Face's form.

    dtype: of the parameters, whatever the files hold. config: None for the folder's own; another one's tensors must
    have the same shapes. ValueError: of `read_config`, `Weights` and `Weights.check`.
    """
    config = config or read_config(folder)[0]
    weights = Weights(folder)
    weights.check(config)
    model = Llama(config, device="meta", dtype=dtype).to_empty(device=device or "cpu")
    model.tie()
    fill(model, weights)
    return model


@torch.no_grad()
def fill(
    model: Llama,
    weights: Weights,
    gathered: Callable[[nn.Parameter], AbstractContextManager[Any]] = lambda parameter: nullcontext(),
) -> None:
    """Set every parameter from weights that `Weights.check` has found to be the model's; gathered: see `initialise`."""
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            parameter.copy_(weights.read(name))


def save(
    model: Llama,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_positions: int | None = None,
    like: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Save a model as a folder in Hugging Face's form; dtype: None for the model's own. The rest: see `write`."""
    parameters = dict(model.named_parameters())
    dtype = dtype or next(iter(parameters.values())).dtype
    write(
        folder,
        model.config,
        parameters.__getitem__,
        dtype,
        max_positions=max_positions,
        like=like,
        shard_bytes=shard_bytes,
    )


def write(
    folder: str | Path,
    config: ModelConfig,
    parameter: Callable[[str], Tensor],
    dtype: torch.dtype,
    *,
    max_positions: int | None = None,
    like: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder in Hugging Face's form; it appears under its name when it is whole.

    parameter: gives each of the model's, by its name, when its turn comes. dtype: what they are rounded to in the
    files, each of at most `shard_bytes` (or one tensor). max_positions, like: see `config_json`.
    ValueError: a folder that isn't empty, a model that no family of Hugging Face's has, or a number that the dtype
    can't hold. OSError: a full disk, say.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and isn't an empty folder; give another name")
    fields = config_json(config, str(dtype).removeprefix("torch."), max_positions, like)
    fresh = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        (fresh / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        _write_weights(fresh, shapes(config), lambda name: _rounded(name, parameter(name), dtype), dtype, shard_bytes)
        os.replace(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Give a parameter in the files' type; ValueError where a number in it would become infinite."""
    tensor = tensor.detach()
    rounded = tensor.to(dtype)
    if bool((rounded.isinf() & tensor.isfinite()).any()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise ValueError(
            f"{name} holds {largest:g}, and {str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:g}; "
            "save it in another number format, float32 say"
        )
    return rounded


def _write_weights(
    fresh: Path, tensors: Mapping[str, Tensor], content: Callable[[str], Tensor], dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write the files of weights and, if there are several, their index."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * dtype.itemsize
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor.to(dtype)
        room -= size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(fresh / file, shard, content, {"format": "pt"})
    if count > 1:
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        homes = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (fresh / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
