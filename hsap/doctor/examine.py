"""Examine: everything, in this process and in ranks started from it, or on the ranks that a launcher started."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hsap.calibrate.processes import joined, run_ranks, told_to_first
from hsap.doctor.config import check_config
from hsap.doctor.devices import describe_devices
from hsap.doctor.kernels import try_kernels
from hsap.doctor.links import judge_links, measure_links
from hsap.doctor.report import FAILED, Line, Report, together
from hsap.doctor.system import check_system
from hsap.doctor.versions import compare_versions, judge_versions, own_versions
from hsap.ir.check import one_line
from hsap.launched import Place

TIMEOUT_S = 120.0
"""How long ranks may take to meet and to measure."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be examined. device: cpu or cuda; ranks: to be started (None: one a GPU, 2 on CPUs).

    out: folder of the runs to come; overrides: train.py's.
    """

    device: str
    ranks: int | None
    out: str
    overrides: Sequence[str] = ()


def examine(asked: Asked) -> Report | None:
    """Examine this machine, or with a launcher's ranks all of theirs: then on rank 0, and None on the others."""
    place = Place.among_several(os.environ)
    has_gpus = torch.cuda.is_available()
    if place is None:
        ranks = asked.ranks or (torch.cuda.device_count() if asked.device == "cuda" else 2)
        lines = [*judge_versions(has_gpus, own_versions()), *describe_devices(), *check_system(asked.out)]
        lines += _kernels(asked.device, range(torch.cuda.device_count()))
        lines += [*_links(asked.device, ranks), *check_config(asked.overrides)]
        return Report(_head(asked.device, ranks, 1), tuple(lines))
    with joined(place, "nccl" if asked.device == "cuda" else "gloo", TIMEOUT_S):
        lines = [*judge_versions(has_gpus, own_versions()), *describe_devices(), *check_system(asked.out)]
        lines += _kernels(asked.device, [place.local_rank])
        seen = told_to_first([asdict(line) for line in lines], "doctor/lines")
        held = told_to_first(own_versions(), "doctor/versions")
        measured = told_to_first(measure_links(place.rank, asked.device), "doctor/links")
    if seen is None or held is None or measured is None:
        return None
    whole = [*together([Line(**line) for line in own] for own in seen), *compare_versions(held)]
    whole += [*judge_links(measured, asked.device, place.local_world_size), *check_config(asked.overrides)]
    nodes = place.world_size // place.local_world_size
    return Report(_head(asked.device, place.world_size, nodes), tuple(whole))


def _kernels(device: str, indices: Sequence[int]) -> list[Line]:
    """Of several GPUs, what the worst one's are."""
    if device == "cpu":
        return try_kernels(torch.device("cpu"))
    return list(together(try_kernels(torch.device("cuda", index)) for index in indices))


def _links(device: str, ranks: int) -> list[Line]:
    try:
        measured = run_ranks(
            ranks, measure_links, device, timeout_s=TIMEOUT_S, backend="nccl" if device == "cuda" else "gloo"
        )
    except (RuntimeError, TimeoutError) as error:
        why = one_line(str(error).strip().splitlines()[-1])
        told = (
            f"{ranks} ranks on this machine couldn't talk: {why}; check the loopback interface, on GPUs NCCL_DEBUG=INFO"
        )
        return [Line("P2P", FAILED, told)]
    return judge_links(measured, device, ranks)


def _head(device: str, ranks: int, nodes: int) -> str:
    where = f"{nodes} nodes, this one" if nodes > 1 else ""
    return f"hsap doctor, {time.strftime('%Y-%m-%d %H:%M')}: {where}{platform.node()}, {ranks} ranks on {device}"
