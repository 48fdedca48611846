"""Llama-family decoder in plain PyTorch, over local rows of packed sequences; its shape alone needs no torch.

config       dimensions and numerics, checked; parameters and FLOPs
llama        the decoder (rope, scaling: rotary embedding; mlp, loss: in chunks; wide: in which sums are kept; offload:
             what layers keep, on the host)
huggingface  folders of Hugging Face's, read and written
tsp          the same decoder with its weights sharded over ranks
"""

import importlib
from typing import Any

from hsap.models.config import ModelConfig

_HOME_OF = {
    "Attention": "llama",
    "Llama": "llama",
    "build_model": "llama",
    "initialise": "llama",
    "token_loss_sum": "loss",
    "token_losses": "loss",
}

__all__ = ["ModelConfig", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hsap.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hsap.models.{_HOME_OF[name]}"), name)
