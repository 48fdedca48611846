"""Outputs of a forward: which module's output is the first that isn't finite, and in which rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

ATTENTION = "attention"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class NonFinite:
    """An output that isn't finite. order: how many modules had finished before it, the same on all ranks; rows: of the
    tensor, in which it isn't; layer: of the model, None outside of all."""

    order: int
    module: str
    layer: int | None
    rows: np.ndarray


class Outputs:
    """While entered, looks at every output of a model's modules, and of its attention, in the order they finish.

    attention: is watched if it is a module. keeps: outputs of layers and of the embedding are kept for
    `gradients`. Looking waits for the device: this is for steps that have gone wrong.
    """

    def __init__(self, model: nn.Module, attention: object = None, keeps: bool = False) -> None:
        self.model, self.attention, self.keeps = model, attention, keeps
        self.first: NonFinite | None = None
        self.kept: list[tuple[str, Tensor]] = []
        self._count = self._attended = 0
        self._handles: list = []

    def __enter__(self) -> Outputs:
        for name, module in self.model.named_modules():
            if name:
                self._handles.append(module.register_forward_hook(self._hook(name)))
        if isinstance(self.attention, nn.Module):
            self._handles.append(self.attention.register_forward_hook(self._attention_hook))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def gradients(self, loss: Tensor) -> NonFinite | None:
        """Of a forward that was watched: the first gradient of a kept output, from the last one on, that isn't finite.

        Gradients of parameters aren't touched, nor are DeepSpeed's hooks on them.
        """
        names, outputs = zip(*self.kept, strict=True)
        found = torch.autograd.grad(loss, outputs, allow_unused=True)
        for order, (name, gradient) in enumerate(zip(reversed(names), reversed(found), strict=True)):
            if gradient is not None and len(rows := _bad_rows(gradient)):
                return NonFinite(order, name, layer_of(name), rows)
        return None

    def _hook(self, name: str) -> Callable:
        def look(module: nn.Module, inputs: tuple, output: object) -> None:
            self._look(name, output)
            if self.keeps and isinstance(output, Tensor) and output.requires_grad and _is_border(name):
                self.kept.append((name, output))

        return look

    def _attention_hook(self, module: nn.Module, inputs: tuple, output: object) -> None:
        self._look(f"model.layers.{self._attended}.{ATTENTION}", output)
        self._attended += 1

    def _look(self, name: str, output: object) -> None:
        self._count += 1
        if self.first is None and isinstance(output, Tensor) and output.is_floating_point():
            rows = _bad_rows(output)
            if len(rows):
                self.first = NonFinite(self._count - 1, name, layer_of(name), rows)


def layer_of(name: str) -> int | None:
    """Which layer a module or a parameter belongs to."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def _is_border(name: str) -> bool:
    return name.endswith("embed_tokens") or re.fullmatch(r".*layers\.\d+", name) is not None


def _bad_rows(output: Tensor) -> np.ndarray:
    flat = output.detach().reshape(len(output), -1) if output.dim() else output.detach().reshape(1, 1)
    return (~torch.isfinite(flat)).any(dim=1).nonzero()[:, 0].cpu().numpy()
