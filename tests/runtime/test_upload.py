"""Upload: values, dtypes and shapes, over chunk borders and for nothing at all."""

import numpy as np
import pytest
import torch

from hsap.runtime.upload import CHUNK_BYTES, Upload, sent
from tests.gpu.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_as_they_are(device: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-9, 9, size).astype(kind) for size in (0, 1, 7, 300) for kind in ("int32", "int64")]
    arrays += [rng.random((5, 3)), np.arange(CHUNK_BYTES // 8 + 3), np.arange(40, dtype=np.int32)[::2]]
    upload = Upload(device)
    tensors = [upload.put(array) for array in arrays]
    upload.flush()
    later = upload.put(np.arange(4))
    upload.flush()
    for array, tensor in zip([*arrays, np.arange(4)], [*tensors, later], strict=True):
        assert tensor.device.type == device and tensor.is_contiguous()
        assert tensor.cpu().numpy().dtype == array.dtype and np.array_equal(tensor.cpu().numpy(), array)


def test_small_tables_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda into, what, **how: copies.append(len(what)) or copy(into, what, **how)
    )
    upload = Upload("cpu")
    for count in (3, 50, 700):
        upload.put(np.arange(count))
    upload.flush()
    upload.flush()
    assert len(copies) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_is_sent_as_it_is(device: str) -> None:
    for tensor in (torch.arange(7), torch.randn(3, 4).T, torch.zeros(0, 2), torch.ones(2, dtype=torch.bfloat16)):
        there = sent(tensor, device)
        assert there.device.type == device and torch.equal(there.cpu(), tensor)
        assert sent(there, device) is there
        assert torch.equal(sent(there, "cpu"), tensor)
