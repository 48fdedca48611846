"""The papers' tables: what HSAP and DCP measured, simulated on the clusters' presets, as ratios beside the published.

    published      the papers' figures, cell by cell, from published.json
    comparison     ratios, how far they agree, a table as a value
    pricing        one attention layer priced by the event clock; packs that stand in for the papers'
    hybrid         HSAP's Tables 2 and 3: one attention
    training       HSAP's Table 4: a model trained on padded batches, on packs, on packs of known documents
    scalability    HSAP's Figure 5: what fits on 64 GPUs, and how fast
    masks          DCP's Figures 13 and 14: attention of DCP and its baselines

Nothing is run and no constant is fitted: clusters are those of configs/cluster, data sheets and assumptions.
"""

from __future__ import annotations

from collections.abc import Callable

from hsap.papers import hybrid, masks, scalability, training
from hsap.papers.comparison import Table
from hsap.papers.pricing import Draw

TABLES: dict[str, Callable[[Draw, int], Table]] = {
    "2": hybrid.table2,
    "3": hybrid.table3,
    "4": training.table4,
    "5": scalability.figure5,
    "dcp13": masks.figure13,
    "dcp14": masks.figure14,
}
"""By name: HSAP's by their number, DCP's by their figure's. Each takes a way to draw packs, and how many of a kind."""

__all__ = ["TABLES", "Table"]
