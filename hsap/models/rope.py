"""Rotary embedding: tables of angles for a pack's positions, and the turning itself."""

import math

import torch
from torch import Tensor

from hsap.models.config import ModelConfig
from hsap.models.scaling import RopeScaling
from hsap.models.wide import wide_dtype

Rope = tuple[Tensor, Tensor]
UNSCALED = RopeScaling()


def rope_tables(
    positions_T: Tensor, head_dim: int, base: float, dtype: torch.dtype, scaling: RopeScaling = UNSCALED
) -> Rope:
    """Cosine and sine of every position's angles, each [T, 1, head_dim / 2].

    Angles are float64: in float32, positions near a million are already wrong by hundredths of a radian. The
    frequencies are made here and not kept in a buffer, because `module.bfloat16()`, which DeepSpeed calls, would
    round it. Rotation happens in float32 (float64 for float64), so that is the dtype of the tables.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device) / head_dim
    frequencies = _scaled(base**-exponents, scaling)
    angles_TD = positions_T.to(torch.float64)[:, None] * frequencies
    wide = wide_dtype(dtype)
    return angles_TD.cos().to(wide)[:, None, :], angles_TD.sin().to(wide)[:, None, :]


def model_rope(config: ModelConfig, positions_T: Tensor, dtype: torch.dtype) -> Rope:
    """The tables of a model's heads; dtype: its hidden states'."""
    scaling = RopeScaling.parse(config.rope_scaling)
    return rope_tables(positions_T, config.head_dim, config.rope_base, dtype, scaling)


def rotate(x_THD: Tensor, rope: Rope) -> Tensor:
    """Turn dimension i together with i + head_dim / 2, as Hugging Face's Llama does."""
    cos, sin = rope
    first, second = x_THD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies [radians per position]; `RopeScaling` says how."""
    if scaling.kind == "llama3":
        turns = scaling.original_tokens * frequencies / (2 * math.pi)
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies / scaling.factor
