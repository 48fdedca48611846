"""Choosing kernels: what auto picks, and who refuses what with which advice."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from hsap.runtime.kernels import flash_attn, select_kernel
from hsap.runtime.kernels.determinism import deterministic_algorithms

MISSING = not flash_attn.is_installed(flash_attn.FA2_MODULE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auto_on_cpu(dtype):
    kernel = select_kernel("auto", "cpu", dtype)
    assert kernel.name == "cpu_flash" and not kernel.float32_output
    assert select_kernel("auto", "cpu", dtype, output="float32").float32_output


def test_auto_on_cuda(monkeypatch):
    monkeypatch.setattr(flash_attn, "is_installed", lambda module: False)
    assert select_kernel("auto", "cuda", torch.bfloat16, head_dim=128).name == "cuda_flash"
    # What flash-attention can't do falls to mathematics.
    assert select_kernel("auto", "cuda", torch.float32).name == "math"
    assert select_kernel("auto", "cuda", torch.bfloat16, output="float32").name == "math"
    assert select_kernel("auto", "cuda", torch.bfloat16, head_dim=320).name == "math"


def fake_module(monkeypatch, name, **functions):
    module = types.ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_attn, "is_installed", lambda asked: asked == name)


def test_auto_on_cuda_prefers_the_package(monkeypatch):
    wrapped = {"_wrapped_flash_attn_varlen_forward": None, "_wrapped_flash_attn_varlen_backward": None}
    fake_module(monkeypatch, flash_attn.FA2_MODULE, **wrapped)
    assert select_kernel("auto", "cuda", torch.bfloat16).name == "flash_attn"
    assert select_kernel("auto", "cuda", torch.bfloat16, softcap=30.0).softcap == 30.0


def test_old_package_is_refused(monkeypatch):
    fake_module(monkeypatch, flash_attn.FA2_MODULE)
    with pytest.raises(ValueError, match=r"flash-attn 2\.7 or later.*kernel=cuda_flash"):
        select_kernel("flash_attn", "cuda", torch.bfloat16)
    fake_module(monkeypatch, flash_attn.FA3_MODULE, _flash_attn_forward=lambda: None)
    with pytest.raises(ValueError, match=r"newer version.*kernel=cuda_flash"):
        select_kernel("flash_attn3", "cuda", torch.bfloat16)


@pytest.mark.skipif(not MISSING, reason="flash-attn is installed")
def test_missing_package_says_how_to_install_it():
    with pytest.raises(ValueError, match=r"pip install hsap\[flash\].*kernel=cuda_flash"):
        select_kernel("flash_attn", "cuda", torch.bfloat16)
    # Only the package has softcap, so auto ends there too.
    with pytest.raises(ValueError, match=r"pip install hsap\[flash\]"):
        select_kernel("auto", "cuda", torch.bfloat16, softcap=30.0)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "options", "words"),
    [
        ("nonesuch", "cpu", torch.float32, {}, "no kernel 'nonesuch'.*cpu_flash.*math"),
        ("math", "cpu", torch.float32, {"output": "bf16"}, "native or float32, not 'bf16'"),
        ("cpu_flash", "cuda", torch.bfloat16, {}, "lacks device cuda; use kernel=.*cuda_flash"),
        ("cuda_flash", "cpu", torch.float32, {}, "lacks device cpu, dtype float32; use kernel=cpu_flash or math"),
        ("cuda_flash", "cuda", torch.bfloat16, {"softcap": 5.0}, "lacks softcap; use kernel=flash_attn$"),
        ("cuda_flash", "cuda", torch.bfloat16, {"output": "float32"}, "lacks output=float32; use kernel=math"),
        ("cuda_flash", "cuda", torch.bfloat16, {"head_dim": 320}, "lacks head dimension 320; use kernel=math"),
        ("flash_attn", "cuda", torch.float64, {}, "lacks dtype float64; use kernel=math"),
        ("cpu_flash", "cpu", torch.float32, {"softcap": 5.0}, "lacks softcap; nor has any other"),
        ("auto", "cpu", torch.float32, {"softcap": 5.0}, "cpu_flash lacks softcap; .*flash_attn lacks device cpu"),
        (
            "math",
            "cuda",
            torch.float32,
            {"deterministic": True},
            "math lacks a deterministic backward on cuda; nor has",
        ),
        (
            "math",
            "cuda",
            torch.bfloat16,
            {"deterministic": True, "head_dim": 64},
            "use kernel=flash_attn3 or flash_attn",
        ),
        (
            *("flash_attn3", "cuda", torch.bfloat16, {"deterministic": True, "head_dim": 256}),
            "flash_attn3 lacks a deterministic backward at head dimension 256; use kernel=flash_attn or cuda_flash",
        ),
        ("auto", "cpu", torch.int64, {}, "cpu_flash lacks dtype int64"),
        ("auto", "cpu", torch.float32, {"sinks": torch.zeros(2)}, "no attention sinks"),
        ("math", "cpu", torch.float32, {"dropout": 0.1}, "no attention dropout"),
    ],
)
def test_refusals_say_what_can(name, device, dtype, options, words):
    with pytest.raises(ValueError, match=words):
        select_kernel(name, device, dtype, **options)


def test_deterministic_backward_is_asked_for(monkeypatch):
    monkeypatch.setattr(flash_attn, "is_installed", lambda module: False)
    for wanted in (False, True):
        assert select_kernel("auto", "cuda", torch.bfloat16, deterministic=wanted).deterministic is wanted
    assert select_kernel("auto", "cpu", torch.bfloat16, deterministic=True).name == "cpu_flash"


@pytest.mark.parametrize("before", ["default", "warn", "error"])
def test_torch_is_switched_for_the_kernel_alone(before):
    torch.set_deterministic_debug_mode(before)
    mode = torch.get_deterministic_debug_mode()
    try:
        for wanted, inside in ((False, mode), (True, 2)):
            with pytest.raises(KeyError), deterministic_algorithms(wanted):
                assert torch.get_deterministic_debug_mode() == inside
                assert torch.utils.deterministic.fill_uninitialized_memory is not wanted
                raise KeyError
            assert torch.get_deterministic_debug_mode() == mode
            assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.set_deterministic_debug_mode("default")
