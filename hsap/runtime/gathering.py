"""Gathering: texts and bytes of any length among the ranks of a group, where something must be said and time is no
matter. Nothing is pickled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_texts(text: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> list[str]:
    """Give every rank's text, in the group's order, to all of them. Collective over the group."""
    content = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(parts, _sent(content.ljust(longest, b"\0"), device), group=group)
    return [bytes(part[: int(size)].cpu().numpy()).decode() for part, size in zip(parts, sizes, strict=True)]


def broadcast_bytes(
    content: bytes, source: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> bytes:
    """Give one rank's bytes to all. source: its place in the group; what others give counts for nothing. Collective."""
    source = dist.get_global_rank(group, source) if group is not None else source
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, source, group=group)
    whole = _sent(content.ljust(int(size), b"\0")[: int(size)], device)
    dist.broadcast(whole, source, group=group)
    return bytes(whole.cpu().numpy())


def _sent(content: bytes, device: torch.device | str) -> Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        if content
        else torch.empty(0, dtype=torch.uint8, device=device)
    )
