"""Choosing a kernel by name, or the fastest one that can do what is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hsap.runtime.kernels import flash_attn
from hsap.runtime.kernels.cpu_flash import CpuFlashKernel
from hsap.runtime.kernels.cuda_flash import CudaFlashKernel
from hsap.runtime.kernels.math import MathKernel
from hsap.runtime.kernels.varlen import does_head_dim
from hsap.runtime.kernels.work import Kernel

HALF = (torch.bfloat16, torch.float16)
ALL = (*HALF, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class _Ability:
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    float32_output: bool
    any_head_dim: bool
    softcap: bool = False


# Fastest first.
KERNELS = {
    "cpu_flash": _Ability(("cpu",), ALL, float32_output=True, any_head_dim=True),
    "flash_attn3": _Ability(("cuda",), HALF, float32_output=False, any_head_dim=False),
    "flash_attn": _Ability(("cuda",), HALF, float32_output=False, any_head_dim=False, softcap=True),
    "cuda_flash": _Ability(("cuda",), HALF, float32_output=False, any_head_dim=False),
    "math": _Ability(("cpu", "cuda"), ALL, float32_output=True, any_head_dim=True),
}


@dataclass(frozen=True, slots=True)
class _Request:
    device: torch.device
    dtype: torch.dtype
    head_dim: int | None
    softcap: float
    output: str
    deterministic: bool

    def lacking_in(self, name: str) -> list[str]:
        """Name what a kernel can't do of what is asked."""
        can = KERNELS[name]
        dim = self.head_dim
        checks = {
            f"device {self.device.type}": self.device.type in can.devices,
            f"dtype {str(self.dtype).removeprefix('torch.')}": self.dtype in can.dtypes,
            f"output={self.output}": can.float32_output or self.output == "native" or self.dtype not in HALF,
            "softcap": can.softcap or not self.softcap,
            f"a deterministic backward{self._where(name)}": not self.deterministic or self._is_deterministic(name),
            f"head dimension {dim}": can.any_head_dim or dim is None or does_head_dim(dim),
        }
        return [what for what, done in checks.items() if not done]

    def _is_deterministic(self, name: str) -> bool:
        """Say whether backward gives the same bits in every run."""
        if name == "math":
            return self.device.type == "cpu"  # cuBLAS promises it for one stream only
        return name != "flash_attn3" or self.head_dim is None or self.head_dim <= flash_attn.FA3_DETERMINISTIC_DIM

    def _where(self, name: str) -> str:
        return f" at head dimension {self.head_dim}" if name == "flash_attn3" else f" on {self.device.type}"


def select_kernel(
    name: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    head_dim: int | None = None,
    softcap: float | None = None,
    sinks: object = None,
    dropout: float = 0.0,
    output: str = "native",
    deterministic: bool = False,
) -> Kernel:
    """Make the kernel `name`, or with "auto" the fastest that is installed and can do what is asked.

    output: "native" gives partial outputs in the inputs' dtype, "float32" at least float32 (math: always float64).
    deterministic: backward gives the same bits in every run, which takes CUDA's kernels more time and memory.
    Raises ValueError where the kernel lacks something, and says which kernel has it.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"there is no kernel {name!r}; the kernels are auto, {', '.join(KERNELS)}")
    if output not in ("native", "float32"):
        raise ValueError(f"a kernel's output is native or float32, not {output!r}")
    for what, asked in (("attention sinks", sinks is not None), ("attention dropout", dropout != 0)):
        if asked:
            raise ValueError(f"kernel {name} has no {what}, nor has any other kernel here; train without {what}")
    request = _Request(torch.device(device), dtype, head_dim, softcap or 0.0, output, deterministic)
    lacking = {other: request.lacking_in(other) for other in KERNELS}
    able = [other for other in KERNELS if not lacking[other]]
    if name == "auto":
        if not able:
            reasons = "; ".join(f"{other} lacks {', '.join(lacks)}" for other, lacks in lacking.items())
            raise ValueError(f"no kernel can do what is asked: {reasons}; ask for less")
        usable = [other for other in able if _is_usable(other, request.device)]
        # With none usable, the first one's own error says how to install it.
        name = (usable or able)[0]
    elif lacking[name]:
        others = f"use kernel={' or '.join(able)}" if able else "nor has any other kernel here"
        raise ValueError(f"kernel {name} lacks {', '.join(lacking[name])}; {others}")
    return _make(name, request)


def usable_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Name the kernels that `select_kernel` may choose on a device, for some head dimension: the fastest first."""
    request = _Request(device, dtype, None, 0.0, "native", False)
    return [name for name in KERNELS if not request.lacking_in(name) and _is_usable(name, device)]


def partial_output(device: torch.device | str) -> str:
    """Give the `output` that loops ask of a kernel: on CPUs float32 costs nothing and keeps bf16's error that of one
    device."""
    return "float32" if torch.device(device).type == "cpu" else "native"


def _is_usable(name: str, device: torch.device) -> bool:
    """Say whether a kernel's package is installed and the GPU is one it runs on."""
    if name == "flash_attn3":
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
        return hopper and flash_attn.is_installed(flash_attn.FA3_MODULE)
    return name != "flash_attn" or flash_attn.is_installed(flash_attn.FA2_MODULE)


def _make(name: str, request: _Request) -> Kernel:
    match name:
        case "cpu_flash":
            return CpuFlashKernel(float32_output=request.output == "float32")
        case "cuda_flash":
            return CudaFlashKernel(request.deterministic)
        case "flash_attn":
            return flash_attn.FlashAttn2Kernel(request.softcap, request.deterministic)
        case "flash_attn3":
            return flash_attn.FlashAttn3Kernel(request.deterministic)
        case _:
            return MathKernel()
