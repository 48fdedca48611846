"""Damage of any kind: bytes changed, cut off or put in, in every file of every sample, are read or refused, no more."""

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

from hsap.data import sources
from hsap.data.fields import Fields

FILES = Path(__file__).parents[1] / "files"
NAMES = (
    *("arrow/saved", "arrow/splits/test", "datatrove", "jsonl/test.jsonl.gz", "jsonl/test.jsonl.zst"),
    *("mds/mixed-columns", "mds/tokens-zstd", "megatron", "parquet/demo-dataset.parquet"),
)
ROUNDS = 40


def damage(random: Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(len(data) or 1)
        kind = random.randrange(4)
        if kind == 0:
            data[at : at + 1] = bytes([random.choice([0, 127, 128, 255])])
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at : at + 4] = random.choice([b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0"])
        else:
            data[at:at] = random.randbytes(random.randrange(9))
    return bytes(data)


def read_damaged(name: str, folder: Path) -> int:
    """Read a sample damaged in many ways; gives how often it was refused."""
    refused = 0
    for seed in range(ROUNDS):
        random = Random(f"{name} {seed}")
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        one = (FILES / name).is_file()
        shutil.copytree(FILES / name, copy) if not one else copy.mkdir()
        path = Path(shutil.copy(FILES / name, copy)) if one else copy
        victim = random.choice(sorted(file for file in copy.rglob("*") if file.is_file()))
        victim.write_bytes(damage(random, victim.read_bytes()))
        try:
            for _ in sources.open(path, Fields(text="message" if "jsonl" in name else "text")):
                pass
        except ValueError as error:
            assert "\n" not in str(error), error
            refused += 1
    return refused


def test_damaged_files_are_read_or_refused(tmp_path):
    # In a process of its own: what a library does with a wild offset may be a crash.
    done = subprocess.run([sys.executable, __file__, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    refused = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(refused) == len(NAMES) and all(ROUNDS / 4 < count <= ROUNDS for count in refused)


if __name__ == "__main__":
    for sample in NAMES:
        print(sample, read_damaged(sample, Path(sys.argv[1])), flush=True)
