"""Hugging Face's folders of models, read and written without its library.

A folder holds config.json and, as safetensors, model.safetensors or several files with model.safetensors.index.json.
Llama 2 and 3 (SmolLM2 among them), Mistral, Qwen2, Qwen2.5 and Qwen3 are understood. `reading` makes a `ModelConfig`
of a config.json and refuses, by the field's name, whatever this decoder would compute otherwise; `writing` is the way
back; `tensors` finds and checks the weights; `folder` loads and saves, one tensor at a time.
"""

import importlib
from typing import Any

from hsap.models.huggingface.reading import configured, read_config

_HOME_OF = {"Weights": "tensors", "fill": "folder", "load": "folder", "save": "folder", "write": "folder"}

__all__ = ["configured", "read_config", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hsap.models.huggingface' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hsap.models.huggingface.{_HOME_OF[name]}"), name)
