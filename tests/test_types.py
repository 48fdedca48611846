"""Types: mypy finds nothing wrong, whoever installs the package sees them, and what is left out says why."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_IGNORED = 12


@pytest.mark.slow
def test_mypy_finds_nothing(tmp_path):
    """With the settings of pyproject.toml, and nothing remembered from another state of the sources."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "--no-error-summary"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_the_package_says_that_it_has_types():
    assert (REPOSITORY / "hsap" / "py.typed").is_file()
    assert '"py.typed"' in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def test_what_is_left_out_is_little_and_says_why():
    """Of a line, one kind of error only, and its reason behind it."""
    files = (REPOSITORY / "hsap").rglob("*.py")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if "type: ignore" in line]
    assert len(lines) <= MOST_IGNORED
    for line in lines:
        assert re.search(r"# type: ignore\[[a-z-]+\]  # \w.{5,}", line), line
