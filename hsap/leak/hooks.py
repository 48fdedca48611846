"""Hooks: hooks on a model's modules that sketch what each gives, row by row, and the gradients of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hsap.leak.sketch import Sketch, Sketcher

OUTPUT = "the output"
MAX_ROWS = 1 << 24
"""Rows, over all modules, above which only whole layers are watched, not what they are made of."""


class Hooks:
    """Watches a model while it is used as a context. Rows are those of the first floating-point output of a module.

    Outputs are looked at whose first dimension (behind one of size 1) has that many rows; all else is passed over.
    deep: modules inside layers too; None: where that isn't too much. Layers are the members of the model's ModuleLists,
    or of what has its children numbered like one.
    forward, backward: by module, in the order in which they ran; a module that ran again has `#2` behind its name.
    inputs: the tensors that begin the watched part of the graph.
    """

    def __init__(self, model: nn.Module, deep: bool | None = None) -> None:
        self.model, self.deep = model, deep
        self.layers = layer_names(model)
        self.forward: dict[str, Sketch] = {}
        self.backward: dict[str, Sketch] = {}
        self.inputs: list[Tensor] = []
        self._rows: int | None = None
        self._sketcher = Sketcher()
        self._on = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Hooks:
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            if name and (self.deep is not False or not self._inside(name)):
                self._handles.append(module.register_forward_hook(self._hook(name, isinstance(module, nn.Embedding))))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """Forget what was seen, and look at one forward."""
        self.forward, self.backward, self.inputs = {}, {}, []
        self._rows, self._on = None, True

    def stop(self, output: Tensor) -> None:
        """Look no more: layers that are made again in backward are the same once more. output: what the run gave."""
        self._on = False
        if output.dim() >= 2 and output.is_floating_point() and self._rows is not None:
            # What is done behind the last module shows in no module.
            self._keep(self.forward, OUTPUT, _rowwise(output, self._rows))

    @property
    def num_rows(self) -> int:
        """Rows of what was looked at; 0 before anything was."""
        return self._rows or 0

    def gradients(self, output: Tensor) -> None:
        """Go backward from a scalar to the inputs; no parameter gets a gradient, nor are those of any touched."""
        grads = torch.autograd.grad(output, self.inputs, allow_unused=True)
        begun = list(self.forward)[: len(self.inputs)]
        for name, tensor, grad in zip(begun, self.inputs, grads, strict=True):
            self._keep(self.backward, name, _rowwise(torch.zeros_like(tensor) if grad is None else grad, self._rows))

    def layer_of(self, name: str) -> str | None:
        """The layer that a module is in or is; None outside of all."""
        return next((layer for layer in self.layers if f"{name}.".startswith(f"{layer}.")), None)

    def _inside(self, name: str) -> bool:
        layer = self.layer_of(name)
        return layer is not None and layer != name.partition("#")[0]

    def _hook(self, name: str, embeds: bool) -> Callable[[nn.Module, Any, Any], Any]:
        def see(_: nn.Module, args: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) and output else output
            if not self._on or not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() < 2:
                return None
            if self._rows is None:
                self._rows = tensor.shape[1] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor.shape[0]
                if self.deep is None and self._rows * len(self._handles) > MAX_ROWS:
                    self.deep = False
            rows = _rowwise(tensor, self._rows)
            if rows is None or (self.deep is False and self._inside(name)):
                return None
            return self._seen(name, tensor, embeds, replaces=tensor is output)

        return see

    def _seen(self, name: str, tensor: Tensor, embeds: bool, replaces: bool) -> Tensor | None:
        times = sum(known.partition("#")[0] == name for known in self.forward)
        key = f"{name}#{times + 1}" if times else name
        begins = not self.forward or (embeds and len(self.forward) == len(self.inputs))
        self._keep(self.forward, key, _rowwise(tensor, self._rows))
        if begins:
            # Of weights that aren't trained, too: rows have gradients all the same.
            given = None if tensor.requires_grad else tensor.detach().requires_grad_()
            self.inputs.append(tensor if given is None else given)
            return given if replaces else None
        if tensor.requires_grad:
            tensor.register_hook(
                lambda grad: None if grad is None else self._keep(self.backward, key, _rowwise(grad, self._rows))
            )
        return None

    def _keep(self, where: dict[str, Sketch], name: str, rows: Tensor | None) -> None:
        if rows is not None:
            where[name] = self._sketcher.of(rows)


def _rowwise(tensor: Tensor, num_rows: int | None) -> Tensor | None:
    """View a tensor as rows, [T, …]; None where it has none."""
    if tensor.shape[0] == num_rows and not (tensor.shape[0] == 1 and tensor.dim() > 2 and tensor.shape[1] == 1):
        return tensor
    return tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 and tensor.shape[1] == num_rows else None


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """Give the names of the members of a model's outermost lists of modules, in order."""
    lists = [name for name, module in model.named_modules() if _is_list(module)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)]
    return tuple(f"{name}.{child}" for name in outer for child, _ in model.get_submodule(name).named_children())


def _is_list(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_children()]
    return not isinstance(module, nn.Sequential) and bool(names) and names == [str(i) for i in range(len(names))]
