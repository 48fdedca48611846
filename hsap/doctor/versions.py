"""Versions: what is installed, and what it costs that something isn't."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass

from hsap.doctor.report import FAILED, OK, WARNING, Line


@dataclass(frozen=True, slots=True)
class _Package:
    """A distribution. least: the lowest version that does; needed: nothing runs without it.

    without: what isn't there without it; install: what gets it; on_gpus: only they use it.
    """

    name: str
    least: str
    needed: bool = True
    without: str = ""
    install: str = "pip install -e ."
    on_gpus: bool = False


PACKAGES = (
    _Package("torch", "2.9"),
    _Package("deepspeed", "0.17", without="train.py"),
    _Package("numpy", "1.26"),
    _Package("numba", "0.60"),
    _Package("hydra-core", "1.3", without="train.py"),
    _Package("transformers", "5.20", False, "Hugging Face models in loops of their own",
             "pip install 'hsap[transformers]'"),
    _Package("mtkahypar", "1.7", False, "planner dcp's own partitioner (ours is used)", "pip install 'hsap[dcp]'"),
    _Package("triton", "3.2", False, "fused row operations (torch's own are used, some launches more)",
             "pip install 'hsap[triton]'", True),
    _Package("flash-attn", "2.7", False, "its kernels (torch's varlen flash is used: about as fast, bf16 and fp16)",
             "pip install 'hsap[flash]'", True),
    _Package("flash-attn-3", "3.0", False, "the fastest kernel on Hopper GPUs", "build flash-attention's hopper folder",
             True),
)  # fmt: skip
LEAST_PYTHON = (3, 10)


def own_versions() -> dict[str, str | None]:
    """Give the versions of this process by name; None for what isn't installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package.name] = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            found[package.name] = None
    return found


def judge_versions(has_gpus: bool, found: dict[str, str | None]) -> list[Line]:
    """Judge versions as `own_versions` gives them."""
    python = found["python"] or ""
    fits = _numbers(python)[:2] >= LEAST_PYTHON
    lines = [Line("python", OK if fits else FAILED, python if fits else f"{python}: HSAP needs 3.10 or later")]
    return lines + [_judged(package, found.get(package.name), has_gpus) for package in PACKAGES]


def _judged(package: _Package, version: str | None, has_gpus: bool) -> Line:
    if version is None:
        if package.on_gpus and not has_gpus:
            return Line(package.name, OK, "not installed, and without GPUs not needed")
        told = f"not installed, so without {package.without}: {package.install}"
        return Line(package.name, FAILED if package.needed else WARNING, told)
    if _numbers(version) < _numbers(package.least):
        told = f"{version}, and HSAP needs {package.least} or later: {package.install}"
        return Line(package.name, FAILED if package.needed else WARNING, told)
    return Line(package.name, OK, version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def compare_versions(by_rank: list[dict[str, str | None]]) -> list[Line]:
    """Tell whether all ranks have the same versions, of several."""
    lines = []
    for name in by_rank[0]:
        held = [versions[name] for versions in by_rank]
        if len(set(held)) > 1:
            other = next(rank for rank, version in enumerate(held) if version != held[0])
            told = f"rank 0 has {held[0]}, rank {other} {held[other]}: install the same everywhere"
            # Other kernels and packing may differ in bits; other torch versions may not even meet.
            lines.append(Line(f"{name} on all ranks", FAILED if name in ("torch", "numpy", "numba") else WARNING, told))
    return lines or [Line("versions on all ranks", OK, f"the same on {len(by_rank)} ranks")]
