"""The settings of training as tables, read from the comments of configs/: a key, its value there, what it means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = {
    "config": "Keys of the whole run",
    "data/demo": "data: documents, chats, packs",
    "model/tiny": "model: its shape, and what it keeps in memory",
    "planner/default": "planner",
    "engine/default": "engine: device and number format",
    "optim/adamw": "optim: AdamW",
    "train/demo": "train: steps, evaluation, checkpoints",
}
"""Files that have every key of their group; the others of a group set the same keys to other values."""
SKIPPED = ("defaults", "hydra")
"""What the file tells Hydra itself."""


class Setting(NamedTuple):
    """A key of a file: its full name, its value as it stands there, and its comment."""

    key: str
    value: str
    meaning: str


_LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: +(?P<rest>.*))?$")
_COMMENT = re.compile(r"""^(?P<value>(?:'[^']*'|"[^"]*"|[^'"#])*?)(?:(?:^| )+# ?(?P<comment>.*))?$""")


def settings(name: str) -> list[Setting]:
    """Read a file of configs/. A key's comment stands behind it, or in lines above it; one key has no two values."""
    group = "" if name == "config" else name.partition("/")[0] + "."
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    found, above, parents = [], [], []
    for number, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            above.append(line.lstrip()[1:].strip())
            continue
        match = _LINE.match(line)
        if not match:
            above = []
            continue
        depth = len(match["indent"]) // 2
        parents = [*parents[:depth], match["key"]]
        part = _COMMENT.match(match["rest"] or "")
        told = " ".join(above) if _belongs(above, number) else ""
        above = []
        if parents[0] in SKIPPED:
            continue
        meaning = ". ".join(filter(None, (told.rstrip("."), (part["comment"] or "").strip())))
        is_group = not part["value"].strip() and number + 1 < len(lines) and lines[number + 1].startswith("  ")
        found.append(Setting(group + ".".join(parents), "" if is_group else part["value"].strip(), meaning))
    return [setting if setting.meaning else setting._replace(meaning=_told_by(setting, found)) for setting in found]


def _told_by(setting: Setting, found: list[Setting]) -> str:
    """Refer to the key whose comment speaks of this one as well."""
    word = setting.key.rpartition(".")[2]
    others = [other.key for other in found if re.search(rf"\b{word}\b", other.meaning)]
    return f"see `{others[0]}`" if others else ""


def _belongs(above: list[str], number: int) -> bool:
    """Say whether the comment above a key is the key's: one at the head of a file is the file's."""
    return bool(above) and number > len(above)


def heading(name: str) -> str:
    """Give the comment at the head of a file."""
    told = []
    for line in (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("# @"):
            continue
        if not line.startswith("#"):
            break
        told.append(line[1:].strip())
    return " ".join(told)


def tables() -> str:
    """Write every group as a table, and name the other files of each group with what they say of themselves."""
    parts = []
    for name, title in FILES.items():
        group = name.partition("/")[0]
        parts.append(f"## {title}\n\n`configs/{name}.yaml`. {_cell(heading(name))}\n")
        parts.append("| key | value there | meaning |\n|---|---|---|")
        parts += [f"| `{s.key}` | {_value(s.value)} | {_cell(s.meaning)} |" for s in settings(name)]
        others = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml") if f"{group}/{path.stem}" != name)
        if others:
            parts.append("\nOther files of the group:\n")
            parts += [
                f"- `{group}={other}`: {_cell(heading(f'{group}/{other}')) or 'see the file'}" for other in others
            ]
        parts.append("")
    for group, title in (
        ("cluster", "cluster: machines, as planner and simulator see them"),
        ("experiment", "experiment"),
    ):
        parts.append(f"## {title}\n")
        names = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        parts += [f"- `{group}={name}`: {_cell(heading(f'{group}/{name}')) or 'see the file'}" for name in names]
        parts.append("")
    return "\n".join(parts)


def _value(value: str) -> str:
    return f"`{value}`".replace("|", "\\|") if value else ""


def _cell(text: str) -> str:
    """Make text fit for a table's cell: its bars and angle brackets mean themselves."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*").replace("_", "\\_")
