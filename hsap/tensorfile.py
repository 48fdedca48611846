"""Files of tensors: safetensors written one tensor at a time, with what it takes to recognise them later."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
"""What safetensors calls the types that are written."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written. size: bytes. sha256: hexadecimal."""

    size: int
    sha256: str


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
    header, offset = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def put(part: bytes | memoryview) -> None:
            digest.update(part)
            file.write(part)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name, like in tensors.items():
            tensor = like if content is None else content(name)
            if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                raise RuntimeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not what was said of it")
            put(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    return Written(8 + len(text) + offset, digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
