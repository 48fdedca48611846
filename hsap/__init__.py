"""HSAP: hierarchical sequence-aware parallel training on packed sequences.

Planning and verifying need NumPy, and numba, which is loaded with the first plan; what runs on torch is loaded when
first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from hsap.api import compile, simulate
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.reader import parse
from hsap.verify import verify

__version__ = "0.1.0"

_HOME_OF = {
    "reference": "hsap.runtime.reference",
    "Executor": "hsap.runtime.executor",
    "SequenceParallel": "hsap.integrations.own_loop",
    "Session": "hsap.runtime.executor",
    "Timeline": "hsap.sim",
    "PlannedAttention": "hsap.runtime.attention",
    "attention": "hsap.runtime.attention",
    "check_leak": "hsap.integrations.leak",
}

__all__ = [
    "Cluster",
    "Executor",
    "HeadShape",
    "Layout",
    "Mask",
    "Plan",
    "PlannedAttention",
    "Problem",
    "SequenceParallel",
    "Session",
    "Timeline",
    "Topology",
    "attention",
    "check_leak",
    "compile",
    "parse",
    "reference",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hsap' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
