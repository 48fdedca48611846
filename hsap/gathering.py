"""Gathering: texts, bytes and numbers of any length among the ranks of a group, where something must be said and time
is no matter. Nothing is pickled: whoever gets a text reads it as one from a file."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def gather_tensors(
    own: Tensor, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> list[Tensor]:
    """Give every rank's numbers [N], of one dtype and any N, in the group's order, to all of them, where `own` lies.

    Collective over the group. device: that its backend sends from; None: what the backend says.
    """
    device = _device(group) if device is None else device
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=own.dtype, device=device) for _ in sizes]
    dist.all_gather(parts, F.pad(own.to(device), (0, longest - len(own))), group=group)
    return [part[: int(size)].to(own.device) for part, size in zip(parts, sizes, strict=True)]


def gather_texts(
    text: str, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> list[str]:
    """Give every rank's text, in the group's order, to all of them. Collective over the group."""
    return [bytes(part.numpy()).decode() for part in gather_tensors(_bytes(text.encode()), group, device)]


def broadcast_bytes(
    content: bytes, source: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> bytes:
    """Give one rank's bytes to all. source: its place in the group; what others give counts for nothing. Collective."""
    device = _device(group) if device is None else device
    source = dist.get_global_rank(group, source) if group is not None else source
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, source, group=group)
    whole = _bytes(content.ljust(int(size), b"\0")[: int(size)]).to(device)
    dist.broadcast(whole, source, group=group)
    return bytes(whole.cpu().numpy())


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group's backend takes tensors from: NCCL from this process's GPU alone."""
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
