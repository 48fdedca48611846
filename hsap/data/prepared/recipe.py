"""Recipe: how documents became tokens, in so far as a model that trains on them has to agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsap import files
from hsap.data.chat.template import Template
from hsap.data.config import DataConfig
from hsap.data.opening import open_template
from hsap.data.tokenizer import Tokenizer
from hsap.ir.check import Refused, fields, instance, one_line, shown, whole, wholes

_TOKENIZER = ("file", "sha256", "vocab_size", "before", "after", "bos", "eos")


def tokenizer_recipe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe a tokenizer by what it does, and by its file, where people look for it."""
    return {
        "file": tokenizer.name,
        "sha256": files.sha256(tokenizer.name),
        "vocab_size": tokenizer.vocab_size,
        "before": list(tokenizer.prefix),
        "after": list(tokenizer.suffix),
        "bos": tokenizer.bos,
        "eos": tokenizer.eos,
    }


def template_recipe(template: Template | None) -> dict[str, Any] | None:
    """Describe a chat template by everything that it makes text of."""
    if template is None:
        return None
    renderer = template.renderer
    content = [renderer.source, sorted(renderer.special.items()), str(renderer.day)]
    name = renderer.name if len(Path(renderer.name).parts) == 1 else Path(renderer.name).name
    return {"name": name, "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def recipe_differs(recipe: Mapping[str, Any], data: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """Say how a run makes tokens of documents otherwise than a recipe: in words, both named; empty where it doesn't.

    Template and loss count where chats are among the documents; a run that has no template, none being named and none
    lying beside the tokenizer, agrees with any.
    """
    was, now = recipe["tokenizer"], tokenizer_recipe(tokenizer)
    differs = []
    if was["sha256"] != now["sha256"]:
        told = [f"{one_line(one['file'])} ({files.short(one['sha256'])})" for one in (was, now)]
        differs.append(f"data.tokenizer was {told[0]}, now {told[1]}")
    else:
        names = {"before": "BOS (data.add_bos, data.bos)", "after": "EOS (data.add_eos, data.eos)"}
        differs += [f"{told} was {was[key]}, now {now[key]}" for key, told in names.items() if was[key] != now[key]]
    if recipe["chat_template"] is not None:
        mine = template_recipe(open_template(data, tokenizer))
        if mine is not None and mine["sha256"] != recipe["chat_template"]["sha256"]:
            both = (recipe["chat_template"], mine)
            told = [f"{one_line(one['name'])} ({files.short(one['sha256'])})" for one in both]
            differs.append(f"the text of data.chat_template was that of {told[0]}, now {told[1]}")
        if data.loss != recipe["loss"]:
            differs.append(f"data.loss was {shown(recipe['loss'])}, now {data.loss}")
    return differs


def recipe_of_json(value: Any, max_vocab_size: int) -> dict[str, Any]:
    """Check a recipe from an index; ValueError where it isn't one."""
    fields("recipe", value, ("tokenizer", "chat_template", "loss"))
    tokenizer = value["tokenizer"]
    fields("recipe.tokenizer", tokenizer, _TOKENIZER)
    whole("recipe.tokenizer.vocab_size", tokenizer["vocab_size"], 0, max_vocab_size)
    for name in ("before", "after"):
        wholes(f"recipe.tokenizer.{name}", instance(f"recipe.tokenizer.{name}", tokenizer[name], list, "a list"), 0)
    for name in ("file", "sha256"):
        instance(f"recipe.tokenizer.{name}", tokenizer[name], str, "text")
    for name in ("bos", "eos"):
        instance(f"recipe.tokenizer.{name}", tokenizer[name], str | None, "a piece or null")
    template = value["chat_template"]
    if template is not None:
        fields("recipe.chat_template", template, ("name", "sha256"))
        for name in ("name", "sha256"):
            instance(f"recipe.chat_template.{name}", template[name], str, "text")
        instance("recipe.loss", value["loss"], str, "a loss of chats")
    elif value["loss"] is not None:
        raise Refused(f"recipe.loss is {shown(value['loss'])} without a chat template")
    return value
