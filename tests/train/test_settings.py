import errno
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hsap.train.settings import keep, write_down
from tests.parity import REPOSITORY
from tests.train.test_config import values

CONFIGS = REPOSITORY / "configs"
ARGUMENTS = ["++planner.name=zigzag", "++optim.lr=1.0e-5", "++planner.window=3"]


def test_what_is_written_down_is_what_hydra_reads_again(tmp_path):
    first = values(*ARGUMENTS)
    keep(tmp_path, write_down(first, {"topology": "2x1", "out": "here"}, ARGUMENTS, CONFIGS))
    command = [sys.executable, str(REPOSITORY / "train.py"), f"--config-path={tmp_path}", "--config-name=config"]
    again = subprocess.run(
        [*command, "train.steps=7", "planner=ring", "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    read = yaml.safe_load(again.stdout)
    planner = {**first["planner"], "name": "ring"}
    assert read == first | {
        "topology": "2x1",
        "out": "here",
        "planner": planner,
        "train": first["train"] | {"steps": 7},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "Hydra makes no folder of its own"


def test_the_command_stands_at_the_head():
    head = write_down(values(), {}, ["++topology=2x1", "++data.path=line one\nline two"], CONFIGS).splitlines()
    assert head[1:3] == ["# train.py ++topology=2x1 '++data.path=line one", "# line two'"]


ODD = ["a\x1bb", "a\udcffb", "a\x7f\uffffb", "a  'b', \"c\": #d", "a\nb", "😀", "1e3", "null", "2024-01-01"]


@pytest.mark.parametrize("value", ODD, ids=ascii)
def test_values_of_any_characters_are_read_again(tmp_path, value):
    from hydra import compose, initialize_config_dir

    written = write_down(values() | {"out": value}, {}, [f"out='{value}'"], CONFIGS)
    keep(tmp_path, written)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("config")["out"] == value


def test_earlier_legs_keep_theirs(tmp_path):
    for text in ("a", "b", "b", "c"):
        keep(tmp_path / "out", text)
    found = {path.name: path.read_text() for path in Path(tmp_path / "out").iterdir()}
    assert found == {"config.yaml": "c", "config.2.yaml": "b", "config.1.yaml": "a"}


def test_on_a_full_disk_what_was_there_stays_and_a_paragraph_says_so(tmp_path, monkeypatch):
    keep(tmp_path, "first")

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"config.yaml can't be written \(No space left on device\); make room"):
        keep(tmp_path, "second")
    assert (tmp_path / "config.yaml").read_text() == "first" and not (tmp_path / "config.1.yaml").exists()
