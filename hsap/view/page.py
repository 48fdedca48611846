"""Page: style, scripts and scenes in one HTML file that loads nothing else.

The scripts in `static` are ES modules, so that editors and tools read them as they are. A page opened from disk may
not import modules, so they are joined here in the order of `SCRIPTS`, each as a function that returns what it exports.
The policy in the page's head allows that one script, by its hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsap.view.scene import Scene, check_comparable, vocabulary

STATIC = Path(__file__).parent / "static"
SCRIPTS = (
    "columns", "words", "colours", "state", "course", "canvas", "boxes", "tip", "plot",
    "matrix", "arrows", "timeline", "memory", "links", "waiting", "stream", "figures", "page",
)  # fmt: skip
STYLES = ("theme", "page", "panels")
MAX_SCENES = 2


def render(scenes: Sequence[Scene]) -> str:
    """Give the page of one scene, or of two side by side.

    ValueError: no scene, more than two, or two of different batches.
    """
    if not 1 <= len(scenes) <= MAX_SCENES:
        raise ValueError(f"view: {len(scenes)} plans; a page shows one, or two side by side")
    check_comparable(scenes)
    titles = " and ".join(scene.title for scene in scenes)
    script = bundle()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(f"{titles} · HSAP"),
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "style": "\n".join((STATIC / f"{name}.css").read_text(encoding="utf-8") for name in STYLES),
        "data": _inert({"words": vocabulary(), "scenes": [scene.to_json() for scene in scenes]}),
        "script": script,
    }
    template = (STATIC / "page.html").read_text(encoding="utf-8")
    # One pass, so that nothing that is put in can be taken for a place.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def bundle() -> str:
    """Join the scripts into one, in which each keeps its names to itself."""
    joined = ['"use strict";']
    for name in SCRIPTS:
        source = (STATIC / f"{name}.js").read_text(encoding="utf-8")
        exported = re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", source, flags=re.MULTILINE)
        source = re.sub(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', r"const \1 = $\2;", source, flags=re.MULTILINE)
        source = re.sub(r"^export ", "", source, flags=re.MULTILINE)
        joined.append(f"const ${name} = (() => {{\n{source}return {{ {', '.join(exported)} }};\n}})();")
    return "(() => {\n" + "\n".join(joined) + "\n})();\n"


def _inert(data: dict[str, Any]) -> str:
    """Write JSON in which no character can end or open an element of the page."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
