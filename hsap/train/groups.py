"""Groups of the configuration: what each key may be, and what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsap.keys import choice, flag, integer, is_integer, is_number, number, rule


def _is_betas(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """A planner by name, and options that only the planner can judge."""

    name: str
    options: Mapping[str, bool | int | float | str | None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What DeepSpeed is told; device and backend are settled once the ranks are known, never null in a TrainConfig.

    comm_ctas: thread blocks that attention's communication may take from its computation; None: as NCCL decides.
    """

    zero_stage: int = choice(0, 1, 2, 3)
    dtype: str = choice("fp32", "bf16")
    device: str | None = choice("cpu", "cuda", optional=True)
    backend: str | None = choice("gloo", "nccl", optional=True)
    comm_ctas: int | None = integer(1, optional=True, default=None)


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW, warm-up and cosine."""

    lr: float = number("a number above 0", lambda v: v > 0)
    warmup_steps: int = integer(0)
    min_lr_ratio: float = number("a number from 0 to 1", lambda v: 0 <= v <= 1)
    weight_decay: float = number("a number of at least 0", lambda v: v >= 0)
    betas: tuple[float, float] = rule("two numbers from 0 to below 1, like [0.9,0.95]", _is_betas)
    eps: float = number("a number above 0", lambda v: v > 0)
    clip: float | None = number("a number above 0", lambda v: v > 0, optional=True)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Steps, and what happens every so many of them; 0 means never."""

    steps: int = integer(1)
    seed: int = integer(0)
    packs_per_step: int = integer(1)
    micro_packs: int = integer(1)
    eval_every: int = integer(0)
    eval_packs: int | None = integer(1, optional=True)
    save_every: int = integer(0)
    keep: int = integer(1)
    save_in_background: bool = flag()
    log_every: int = integer(1)
    tensorboard: bool = flag()
    pad_rows: bool = flag(default=False)


def _is_range(value: Any) -> bool:
    return _is_indices(value) and len(value) == 2 and 1 <= value[0] < value[1]


def _is_indices(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(is_integer(v) and v >= 0 for v in value)


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Steps whose timelines are measured, first to before last, and layers of the model (None: all).

    nvtx: name every instruction to a profiler of the GPU, in all steps and layers.
    """

    steps: tuple[int, int] | None = rule(
        "the first step and the one after the last, like [10,20]", _is_range, optional=True
    )
    layers: tuple[int, ...] | None = rule("indices of layers, like [0,1]", _is_indices, optional=True)
    nvtx: bool = flag(default=False)


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What is checked of a run before its first step.

    leak: whether any document reaches another in the first batch. error_budget: how many times one device's error
    attention may have, split over the ranks; None: isn't measured.
    """

    leak: bool = flag(default=False)
    error_budget: float | None = number(
        "a number of at least 1, like 1.1", lambda v: v >= 1, optional=True, default=None
    )


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """What is done where a loss or a gradient isn't finite, or leaps, and where ranks hang or end.

    non_finite, on_spike: stop ends the run; skip leaves the update out on all ranks; dump writes the step down, to be
    replayed, and ends the run; warn says so and goes on. spike: how many deviations above the median of the last
    `spike_window` steps the loss, or the logarithm of the gradient's norm, may lie; None: isn't looked at. max_skips:
    so many updates in a row may be left out; one more ends the run.

    timeout_s: nobody may move for so long, start_timeout_s: until the first step is through; None: for ever. report_s:
    a rank that waits so long is told of. restarts: how often ranks that HSAP starts go on after a failure.
    """

    non_finite: str = choice("stop", "skip", "dump", default="stop")
    spike: float | None = number("a number above 0, like 6", lambda v: v > 0, optional=True, default=None)
    on_spike: str = choice("warn", "stop", "skip", "dump", default="warn")
    spike_window: int = integer(8, default=128)
    max_skips: int = integer(1, default=5)

    timeout_s: float | None = number(
        "a number of at least 1, of seconds", lambda v: v >= 1, optional=True, default=600.0
    )
    start_timeout_s: float | None = number(
        "a number of at least 1, of seconds", lambda v: v >= 1, optional=True, default=1800.0
    )
    report_s: float = number("a number above 0, of seconds", lambda v: v > 0, default=60.0)
    restarts: int = integer(0, default=0)

    @property
    def dumps(self) -> bool:
        """Whether anything makes the run write a step down."""
        return "dump" in (self.non_finite, self.on_spike)
