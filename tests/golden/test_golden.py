"""Plans of small batches against the texts kept beside this file; `regenerate.py` rewrites them on purpose."""

import pytest
from regenerate import FOLDER, cases

from hsap.ir.reader import parse

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_golden_one(name):
    golden = (FOLDER / name).read_text(encoding="utf-8")
    assert CASES[name].text() == golden
    assert parse(golden) == CASES[name]


def test_every_golden_file_has_a_case():
    assert {path.name for path in FOLDER.glob("*.txt")} == set(CASES)
