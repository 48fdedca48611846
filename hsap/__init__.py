"""HSAP: hierarchical sequence-aware parallel training on packed sequences.

Names are loaded when first used, so that planning and verifying never import torch.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "hsap.ir.layout": ["Layout"],
    "hsap.ir.mask": ["Mask"],
    "hsap.ir.heads": ["HeadShape"],
    "hsap.ir.problem": ["Cluster", "Problem", "Topology"],
    "hsap.ir.plan": ["Plan"],
    "hsap.ir.text": ["parse"],
    "hsap.api": ["compile"],
    "hsap.verify": ["verify"],
    "hsap.runtime.reference": ["reference"],
    "hsap.runtime.executor": ["Executor", "Session"],
    "hsap.runtime.attention": ["PlannedAttention", "attention"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hsap' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
