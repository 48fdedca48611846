"""Launched: what a launcher (torchrun, DeepSpeed's) tells a process of its place among the ranks that it started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hsap.ir.check import Refused


@dataclass(frozen=True, slots=True)
class Place:
    """A process among those that a launcher started; alone where none did."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read the launcher's variables; ValueError: they are no numbers."""
        # DeepSpeed's launcher over MPI calls it LOCAL_SIZE.
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "LOCAL_SIZE"
        try:
            rank, world_size = (int(environment.get(name, usual)) for name, usual in (("RANK", 0), ("WORLD_SIZE", 1)))
            local_world_size = int(environment.get(local_size, world_size))
            local_rank = int(environment.get("LOCAL_RANK", rank % max(local_world_size, 1)))
        except ValueError:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size)
            given = ", ".join(f"{name}={environment.get(name)}" for name in names)
            raise Refused(f"launcher: {given}: these must be numbers; unset RANK where none started this") from None
        return cls(rank, world_size, local_rank, local_world_size)

    @classmethod
    def among_several(cls, environment: Mapping[str, str]) -> Place | None:
        """Read them where a launcher started several ranks; None where none did, or one alone.

        ValueError: they are no numbers, or no place among equally many ranks on every node.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        place = cls.of(environment)
        rank, world_size, here = place.rank, place.world_size, place.local_world_size
        if not 0 <= rank < world_size or here < 1 or world_size % here:
            raise Refused(
                f"launcher: RANK={rank}, WORLD_SIZE={world_size} and {here} ranks on this node can't be: start equally "
                "many ranks on every node, as torchrun does with --nnodes and --nproc-per-node"
            )
        return place if world_size > 1 else None
