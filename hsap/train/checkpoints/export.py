"""Exporting: what a checkpoint says of the model, and its float32 weights whole, one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hsap.models import ModelConfig
from hsap.models.llama import shapes
from hsap.train.checkpoints.folder import LATEST, damage, read_checkpoint
from hsap.train.checkpoints.masters import WEIGHT
from hsap.train.checkpoints.tensors import Pieces


@dataclass(frozen=True, slots=True)
class Exported:
    """The model in a checkpoint. pack_tokens: length of the run's packs, the longest documents it was trained on."""

    config: ModelConfig
    step: int
    pack_tokens: int
    _pieces: Pieces
    _shapes: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: Path) -> Exported:
        """Open a checkpoint, or the newest of a run's folder; ValueError where it is none, or is damaged."""
        if (path / "checkpoints" / LATEST).is_file():
            home = path / "checkpoints"
            path = home / (home / LATEST).read_text(encoding="utf-8").strip()
        state = read_checkpoint(path)
        if problem := damage(path, state, state["files"]):
            raise ValueError(f"{problem}; take another checkpoint")
        identity = state["identity"]
        shape = {name.removeprefix("model."): value for name, value in identity.items() if name.startswith("model.")}
        config = ModelConfig.from_mapping(shape)
        pieces = Pieces(path / name for name in state["files"])
        return cls(config, state["step"], identity["data.pack_tokens"], pieces, shapes(config))

    def parameter(self, name: str) -> Tensor:
        """Give a parameter in float32."""
        shape = self._shapes[name].shape
        return self._pieces.read(WEIGHT, name, 0, math.prod(shape)).view(shape)
