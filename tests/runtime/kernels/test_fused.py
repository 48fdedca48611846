"""Who does row operations: Triton on CUDA where it can be used, torch everywhere else."""

from __future__ import annotations

import importlib
import importlib.util
import types

import pytest

from hsap.runtime.kernels import fused as fusing


@pytest.fixture(autouse=True)
def asked_anew():
    fusing.fused.cache_clear()
    yield
    fusing.fused.cache_clear()


def offer(monkeypatch: pytest.MonkeyPatch, **functions) -> types.SimpleNamespace:
    module = types.SimpleNamespace(**functions)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    return module


def test_cpus_and_machines_without_triton_use_torch(monkeypatch) -> None:
    offer(monkeypatch)
    assert fusing.fused("cpu") is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fusing.fused("cuda") is None


def test_cuda_uses_triton_once_it_has_been_tried_out(monkeypatch) -> None:
    tried = []
    module = offer(monkeypatch, try_out=tried.append)
    assert fusing.fused("cuda") is module and fusing.fused("cuda") is module
    assert tried == ["cuda"]


def test_a_triton_that_can_t_compile_is_told_of_once(monkeypatch) -> None:
    def fail(device):
        raise RuntimeError("Failed to find\n C compiler")

    offer(monkeypatch, try_out=fail)
    with pytest.warns(UserWarning, match="triton can't be used here.*Failed to find C compiler"):
        assert fusing.fused("cuda") is None
    assert fusing.fused("cuda") is None
