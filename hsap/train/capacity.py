"""Capacity: the constant number of rows that a rank's rows are padded to, so that shapes don't change with packs."""

from __future__ import annotations

from dataclasses import dataclass

from hsap.data.packing.settings import Packing


@dataclass(frozen=True, slots=True)
class Capacity:
    """Rows of a rank in every micro-batch of a run.

    even: a rank's rows of the largest micro-batch there can be, dealt evenly. rows: that and a sixteenth, which is the
    room that planners take who balance work and tokens; rounded up to 16. step: by how many it is raised for a
    micro-batch dealt less evenly than that.
    """

    even: int
    rows: int
    step: int

    @classmethod
    def of(cls, packing: Packing, micro_packs: int, num_ranks: int) -> Capacity:
        """Make that of a run: its longest packs, packs of a micro-batch, ranks of an SP group."""
        even = -(-packing.max_pack_tokens * micro_packs // num_ranks)
        step = _up(-(-even // 16), 16)
        return cls(even, _up(even + -(-even // 16), 16), step)

    def padded(self, num_rows: int) -> int:
        """Rows of a rank that has so many of its own: nearly always `rows`; never fewer than its own."""
        return self.rows + _up(max(num_rows - self.rows, 0), self.step)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
