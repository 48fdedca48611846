"""Compiled loops are those of the sources: whatever changes, however many processes, wherever they may write."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hsap import loops
from hsap.sim.share import of_cores

LOOPS = Path(__file__).resolve().parents[1] / "hsap" / "loops.py"
CALLEE = "from mini.loops import inner\n\n@inner\ndef callee(x):\n    return x + {}\n"
CALLER = (
    "from mini.loops import loop\nfrom mini.ir.constant import HUNDRED\nfrom mini.room.callee import callee\n\n"
    "@loop\ndef caller(x):\n    return callee(x) + HUNDRED\n"
)
ASK = "from mini.room.caller import caller; print(caller(1), sum(caller.stats.cache_hits.values()))"


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    """A package with the loops' module, a caller and a callee in two files, and a constant of its `ir`."""
    package = tmp_path / "mini"
    (package / "ir").mkdir(parents=True)
    (package / "room").mkdir()
    shutil.copy(LOOPS, package / "loops.py")
    (package / "ir" / "constant.py").write_text("HUNDRED = 100\n")
    (package / "room" / "callee.py").write_text(CALLEE.format(1))
    (package / "room" / "caller.py").write_text(CALLER)
    return package


def start(mini: Path, **environment: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    # Without files of byte code, which Python takes for fresh where a source changes within its clock's tick.
    kept |= {"PYTHONPATH": str(mini.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen([sys.executable, "-c", ASK], env=kept | environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def ask(mini: Path, **environment: str) -> tuple[int, int]:
    """What the caller gives, and how often its code was there already."""
    out, err = start(mini, **environment).communicate()
    assert err == "", err
    value, hits = out.split()
    return int(value), int(hits)


def places(root: Path) -> list[Path]:
    return sorted(root.glob("hsap-room-*"))


def test_a_changed_callee_or_constant_in_another_file_is_compiled_into_its_caller(mini: Path) -> None:
    cache = mini / "room" / "__pycache__"
    assert ask(mini) == (102, 0)
    assert ask(mini) == (102, 1)
    before = places(cache)
    (cache / "kept").touch()
    (mini / "room" / "callee.py").write_text(CALLEE.format(2))
    assert ask(mini) == (103, 0)
    (mini / "ir" / "constant.py").write_text("HUNDRED = 200\n")
    assert ask(mini) == (203, 0)
    assert ask(mini) == (203, 1)
    assert len(before) == len(places(cache)) == 1 and before != places(cache)
    assert (cache / "kept").exists()


def test_a_given_root_is_used_and_two_copies_share_it(mini: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    other = tmp_path / "other" / "mini"
    shutil.copytree(mini, other)
    (other / "room" / "callee.py").write_text(CALLEE.format(5))
    assert ask(mini, NUMBA_CACHE_DIR=str(root)) == (102, 0)
    assert ask(other, NUMBA_CACHE_DIR=str(root)) == (106, 0)
    assert ask(mini, NUMBA_CACHE_DIR=str(root)) == (102, 1)
    assert len(places(root)) == 2 and not (mini / "room" / "__pycache__").exists()


def test_an_installation_that_cannot_be_written_to(mini: Path, tmp_path: Path) -> None:
    # A file in the way stops root too, whom no permission would.
    (mini / "room" / "__pycache__").touch()
    user = tmp_path / "user"
    assert ask(mini, XDG_CACHE_HOME=str(user), HOME=str(user)) == (102, 0)
    assert ask(mini, XDG_CACHE_HOME=str(user), HOME=str(user)) == (102, 1)
    (tmp_path / "file").touch()
    assert ask(mini, XDG_CACHE_HOME=str(tmp_path / "file"), HOME=str(tmp_path / "file")) == (102, 0)


def test_processes_that_start_together(mini: Path) -> None:
    (mini / "room" / "__pycache__" / "hsap-room-00000000-old").mkdir(parents=True)
    together = [start(mini) for _ in range(4)]
    for process in together:
        out, err = process.communicate()
        assert out.split()[:1] == ["102"] and err == ""
    assert ask(mini) == (102, 1)
    assert len(list((mini / "room" / "__pycache__").glob("hsap-room-*/noticed"))) == 1


def test_counting_is_left_out_where_numba_can(monkeypatch) -> None:
    asked = loops.inner(of_cores, allocates=False).targetoptions
    assert asked["_nrt"] is False and asked["no_cpython_wrapper"]
    assert "_nrt" not in loops.inner(of_cores).targetoptions
    monkeypatch.setattr(loops, "_CAN_LEAVE_UNCOUNTED", False)
    assert "_nrt" not in loops.loop(allocates=False)(of_cores).targetoptions


def test_only_loops_of_a_room_are_decorated() -> None:
    from hsap.loops import loop

    with pytest.raises(ValueError, match="in no folder below"):
        loop(ask)
