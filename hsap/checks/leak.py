"""Leak: `hsap check leak`, the leak check of a configuration's first batch without training."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hsap.leak.report import LeakReport
from hsap.train.run import Trainer


def first_leaks(trainer: Trainer) -> list[LeakReport]:
    """Check the first step's batch in every SP group: their reports, on all ranks. Collective over the job."""
    return trainer.leaks(trainer.first_step())


def tell(reports: Sequence[LeakReport], as_json: bool) -> None:
    """Print them, by SP group."""
    if as_json:
        groups = [report.to_json() for report in reports]
        print(json.dumps({"ok": all(report.ok for report in reports), "groups": groups}), flush=True)
        return
    for number, report in enumerate(reports):
        group = f"SP group {number}: " if len(reports) > 1 else ""
        print(f"{group}{report}", flush=True)
