"""Which part of which parameter a rank holds when weights are sharded over D ranks.

Attention goes by KV heads: a rank's share is some KV heads with all the query heads that they serve; where there are
more ranks than KV heads, several hold one KV head's projections and share its query heads out. The MLP goes by columns
of its hidden layer, embedding and lm head by tokens of the vocabulary: both are as large as many layers together, so
that replicas of them would outweigh what sharding the layers saves. Norms, and the bias that o_proj adds, are
replicated. Where a number doesn't divide, the first ranks hold one more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsap.ir.heads import HeadRun
from hsap.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _COLUMNS = 0, 1
_SHARDED = {
    "q_proj.weight": ("q", _ROWS),
    "q_proj.bias": ("q", _ROWS),
    "k_proj.weight": ("kv", _ROWS),
    "k_proj.bias": ("kv", _ROWS),
    "v_proj.weight": ("kv", _ROWS),
    "v_proj.bias": ("kv", _ROWS),
    "o_proj.weight": ("q", _COLUMNS),
    "gate_proj.weight": ("ffn", _ROWS),
    "up_proj.weight": ("ffn", _ROWS),
    "down_proj.weight": ("ffn", _COLUMNS),
    "embed_tokens.weight": ("vocabulary", _ROWS),
    "lm_head.weight": ("vocabulary", _ROWS),
}
_ELSEWHERE = {"offload_checkpoints": False, "mlp_chunk_tokens": None, "loss_chunk_vocab": None, "compile": False}
"""Ways of computing a model that the sharded decoder doesn't have, and what they are when off."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of one parameter: [start, stop) of an axis of the whole one, or all of it where axis is None.

    whole: the whole parameter's shape. holders: indices of the ranks that hold this very part, in ascending order.
    """

    whole: tuple[int, ...]
    axis: int | None
    start: int
    stop: int
    holders: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(self.stop - self.start if axis == self.axis else n for axis, n in enumerate(self.whole))

    def take(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, as a view."""
        return whole if self.axis is None else whole.narrow(self.axis, self.start, self.stop - self.start)


class WeightShards:
    """How a model's weights are dealt to `degree` ranks.

    ValueError where some rank would get nothing, and for a model that asks for what the sharded decoder can't do.

    heads: query and KV heads of each; ffn and vocabulary: their borders, degree + 1 of them.
    """

    def __init__(self, config: ModelConfig, degree: int) -> None:
        for name, plain in _ELSEWHERE.items():
            if getattr(config, name) != plain:
                raise ValueError(
                    f"model.{name}={getattr(config, name)} isn't there under parallel=tsp, whose blocks are others: "
                    f"leave it at {'null' if plain is None else str(plain).lower()}"
                )
        self.config, self.degree = config, degree
        self.heads = head_shares(config.num_q_heads, config.num_kv_heads, degree)
        for name in ("ffn_dim", "vocab_size"):
            if getattr(config, name) < degree:
                raise ValueError(
                    f"model.{name} is {getattr(config, name)}, too few to shard over {degree} ranks, each of which "
                    "must get some; use a smaller TSP degree"
                )
        self.ffn, self.vocabulary = _even(config.ffn_dim, degree), _even(config.vocab_size, degree)

    def part(self, name: str, whole: tuple[int, ...], index: int) -> Part:
        """What the rank with that index holds of a parameter, given by its full name and its whole shape."""
        everyone = tuple(range(self.degree))
        kind, axis = _SHARDED.get(".".join(name.split(".")[-2:]), (None, None))
        if kind is None:
            return Part(whole, None, 0, whole[0], everyone)
        start, stop = self._range(kind, index)
        holders = tuple(i for i in everyone if self._range(kind, i) == (start, stop)) if kind == "kv" else (index,)
        return Part(whole, axis, start, stop, holders)

    def _range(self, kind: str, index: int) -> tuple[int, int]:
        if kind in ("q", "kv"):
            run, dim = self.heads[index], self.config.head_dim
            first, count = (run.q_first, run.q_count) if kind == "q" else (run.kv_first, run.kv_count)
            return first * dim, (first + count) * dim
        borders = self.ffn if kind == "ffn" else self.vocabulary
        return borders[index], borders[index + 1]


def head_shares(num_q_heads: int, num_kv_heads: int, degree: int) -> tuple[HeadRun, ...]:
    """Deal heads to ranks by KV head: query heads [first, count] and KV heads [first, count] of each.

    Every share has equally many query heads to each of its KV heads, so that it is an attention of its own. ValueError
    where a KV head would be shared by more ranks than it has query heads.
    """
    group = num_q_heads // num_kv_heads
    if degree <= num_kv_heads:
        borders = _even(num_kv_heads, degree)
        return tuple(HeadRun(a * group, (b - a) * group, a, b - a) for a, b in itertools.pairwise(borders))
    ranks = _even(degree, num_kv_heads)
    if ranks[1] > group:
        raise ValueError(
            f"a TSP degree of {degree} gives the query heads of one of {num_kv_heads} KV heads to {ranks[1]} ranks, "
            f"but it has {group}; the largest degree of this model is {num_q_heads}"
        )
    shares = []
    for head, (a, b) in enumerate(itertools.pairwise(ranks)):
        for first, stop in itertools.pairwise(_even(group, b - a)):
            shares.append(HeadRun(head * group + first, stop - first, head, 1))
    return tuple(shares)


def _even(total: int, parts: int) -> list[int]:
    """Borders of `total` things dealt to `parts` in order; the first ones get one more where it doesn't divide."""
    return [i * (total // parts) + min(i, total % parts) for i in range(parts + 1)]
