"""Agreement: whether a run reads data as they were prepared."""

from __future__ import annotations

import json
from pathlib import Path

from hsap.data.config import OF_ROWS, DataConfig, data_config
from hsap.data.prepared.index import read_index
from hsap.data.prepared.recipe import recipe_differs
from hsap.data.tokenizer import Tokenizer
from hsap.ir.check import Refused, shown

_WAYS = ("answers", "trees")
"""Of chats: which of them there are. Template and loss are the recipe's."""


def check_agreement(folder: str | Path, data: DataConfig, tokenizer: Tokenizer) -> None:
    """Refuse to train on a prepared folder with other settings than it was made with; ValueError names both.

    Tokenizer, BOS and EOS must be the same, and for chats template, loss, answers and trees. Of the others those count
    that somebody has set.
    """
    index = read_index(folder)
    usual = data_config({"path": str(folder), "tokenizer": tokenizer.name})
    differs = recipe_differs(index.recipe, data, tokenizer)
    chats = _WAYS if index.recipe["chat_template"] is not None else ()
    for name in (*chats, *OF_ROWS):
        was = index.settings.get(f"data.{name}")
        now = json.loads(json.dumps(getattr(data, name)))
        if now != was and (name in chats or now != getattr(usual, name)):
            differs.append(f"data.{name} was {shown(was)}, now {shown(now)}")
    if differs:
        raise Refused(
            f"{folder} was prepared otherwise than this run reads data: {'; '.join(differs)}; set them to what they "
            f"were, or prepare the data anew with `hsap prepare`"
        )
