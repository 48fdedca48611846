"""Files of tensors: safetensors written one tensor at a time, with what it takes to recognise them later."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from hsap.files import Written, write

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""What safetensors calls the types that are written."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    content: Callable[[str], Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors, any device, as a safetensors file that is on the disk when this returns.

    One at a time, so that memory holds no second copy of them. With `content`, tensors give shapes and dtypes only
    (they may be on the meta device), and it gives each by its name when its turn comes.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return write(path, chain((len(text).to_bytes(8, "little"), text), _parts(tensors, content)))


def _parts(tensors: Mapping[str, Tensor], content: Callable[[str], Tensor] | None) -> Iterator[memoryview]:
    for name, like in tensors.items():
        tensor = like if content is None else content(name)
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise RuntimeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not what was said of it")
        yield _bytes(tensor)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
