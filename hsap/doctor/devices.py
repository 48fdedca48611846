"""Devices: GPUs, and what ranks talk through."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from hsap.doctor.report import FAILED, OK, WARNING, Line

_GIB = 1 << 30
BUSY = 0.1
"""A GPU of whose memory more than this part is taken has another user."""


def describe_devices() -> list[Line]:
    """Describe the GPUs that this process sees, and judge the backends."""
    lines = _gpus()
    has_gpus = torch.cuda.is_available()
    gloo, nccl = dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()
    told = (
        "there, for CPUs" if gloo else "missing in this build of torch: CPU ranks can't talk; install torch from PyPI"
    )
    lines.append(Line("gloo", OK if gloo else FAILED, told))
    if nccl:
        lines.append(Line("nccl", OK, ".".join(map(str, torch.cuda.nccl.version())) if has_gpus else "there"))
    elif has_gpus:
        lines.append(Line("nccl", FAILED, "missing in this build of torch: GPU ranks can't talk; install a CUDA build"))
    else:
        lines.append(Line("nccl", OK, "missing, and without GPUs not needed"))
    return lines


def _gpus() -> list[Line]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return [Line("gpus", OK, "none: this torch is built for CPUs, on which ranks run")]
        told = (
            f"none is visible to a torch built for CUDA {torch.version.cuda}: ranks run on the CPU; on a machine with "
        )
        return [Line("gpus", WARNING, told + "GPUs check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES")]
    kinds = Counter(_kind(index) for index in range(torch.cuda.device_count()))
    status = OK if len(kinds) == 1 else WARNING
    told = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    lines = [Line("gpus", status, told + ("" if status == OK else ": the slowest one is waited for"))]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if free < (1 - BUSY) * total:
            told = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free: another process has the rest (nvidia-smi)"
            lines.append(Line(f"gpu {index}", WARNING, told))
    driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # builds for CPUs have none
    told = f"{torch.version.cuda}, of the driver {driver // 1000}.{driver % 1000 // 10}"
    return [*lines, Line("cuda", OK, told)]


def _kind(index: int) -> str:
    known = torch.cuda.get_device_properties(index)
    return f"{known.name} ({known.total_memory / _GIB:.1f} GiB, compute {known.major}.{known.minor})"
