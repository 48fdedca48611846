"""What the runtime's tests compare with: attention by its definition in float64 (`hsap.runtime.accuracy`)."""

from hsap.runtime.accuracy import exact_attention as attention
from hsap.runtime.accuracy import random_inputs as tensors
from hsap.runtime.accuracy import rmse

__all__ = ["attention", "rmse", "tensors"]
