"""Llama-family decoder in plain PyTorch, over local rows of packed sequences."""

from hsap.models.config import ModelConfig
from hsap.models.llama import Attention, Llama, build_model, initialise
from hsap.models.loss import IGNORED_TARGET, token_loss_sum, token_losses

__all__ = [
    "IGNORED_TARGET",
    "Attention",
    "Llama",
    "ModelConfig",
    "build_model",
    "initialise",
    "token_loss_sum",
    "token_losses",
]
