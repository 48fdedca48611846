import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def batches():
    """Batches of the planning benchmark: name@tokens -> lists of document lengths."""
    return json.loads((Path(__file__).parents[1] / "bench" / "planning_workloads.json").read_text(encoding="utf-8"))
