"""Settings of data as flags: `data.` of train.py's configuration, by the same names and with the same defaults."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from hsap.data.config import DataConfig

READING = {
    "format": ("NAME", "json, parquet, arrow, mds, megatron, bin, npy, datatrove, text, source_tree, source_trees"),
    "text_field": ("NAME", "the field of a row that holds its text"),
    "tokens_field": ("NAME", "the field that holds token ids"),
    "labels_field": ("NAME", "the field that holds labels"),
    "id_field": ("NAME", "the field that names a row"),
    "token_dtype": ("NAME", "of token files that don't say it: uint16, uint32, …"),
    "end_id": ("ID", "of token files without borders: the token that ends each document"),
    "begin_id": ("ID", "or the one that begins it"),
    "exhausted": ("HOW", "of a mixture's data sets, one that has ended begins anew (restart) or ends it (stop)"),
    "add_bos": ("BOOL", "begin every document with BOS: true, false"),
    "add_eos": ("BOOL", "end every document with EOS"),
    "bos": ("PIECE", "the piece to use"),
    "eos": ("PIECE", "the piece to use"),
    "chat_template": ("NAME|FILE", "chatml, llama2, mistral or a file"),
    "chat_date": ("DAY", "what templates take for today"),
    "chat_fields": ("YAML", "names of fields of chats, as in '{messages: talk}'"),
    "loss": ("WHAT", "of chats: assistant, last_assistant, weighted, all"),
    "answers": ("WHICH", "of a question with several: all, best"),
    "trees": ("WHICH", "ways through a tree of messages: all, best"),
}
"""How rows become documents and documents tokens; for each setting what stands for its value, and its help."""
PACKING = {
    "pack_tokens": ("N", "tokens of a pack"),
    "packing": ("POLICY", "best_fit, balanced, concat"),
    "long_documents": ("HOW", "cut, keep, drop"),
    "max_document_tokens": ("N", "with keep: the longest document kept whole"),
    "max_delay_steps": ("N", "with balanced: how long a document may wait"),
    "curriculum": ("YAML", "[[step, pack_tokens], …]"),
}
"""How documents become packs."""
SEED = 1234
"""train.seed where nobody sets it."""
PACKS_PER_STEP = 2
"""train.packs_per_step where nobody sets it."""
CACHE = "outputs/prepared"
"""data.cache where nobody sets it."""


def add_flags(command: argparse.ArgumentParser, title: str, settings: Mapping[str, tuple[str, str]]) -> None:
    """Add a flag for each setting: data.text_field is --text-field, or --policy for data.packing."""
    group = command.add_argument_group(title)
    for name, (value, told) in settings.items():
        flags = [flag_of(name)] + (["--policy"] if name == "packing" else [])
        group.add_argument(*flags, dest=name, metavar=value, help=told)


def add_source(command: argparse.ArgumentParser) -> None:
    """Add the data set, or several."""
    command.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a file or folder of any format, hf:NAME#SPLIT, several one after the other, or '{PATH: WEIGHT, …}'",
    )


def path_of(given: list[str]) -> Any:
    """Give what data.path would be: one path, several, or a mapping with weights; ValueError for what isn't YAML."""
    if len(given) > 1:
        return given
    return (
        _yaml("SOURCE", given[0], "a mapping is written {a.jsonl: 0.7, b/: 0.3}, a list [a.jsonl, b/]")
        if given[0].lstrip().startswith(("{", "["))
        else given[0]
    )


def read(arguments: argparse.Namespace, path: Any, tokenizer: str) -> DataConfig:
    """Make a `DataConfig` of the flags that were given; ValueError names the setting."""
    from dataclasses import fields

    from hsap.data.config import DataConfig, data_config

    types = {field.name: field.type for field in fields(DataConfig)}
    given: dict[str, Any] = {"path": path, "tokenizer": tokenizer}
    for name in (*READING, *PACKING):
        value = getattr(arguments, name, None)
        if value is not None:
            given[name] = (
                value
                if types[name].startswith("str") and value != "null"
                else _yaml(flag_of(name), value, f"it says {(READING | PACKING)[name][1]}")
            )
    return data_config(given)


def flag_of(name: str) -> str:
    """Give the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def as_flags(text: str) -> str:
    """Name settings in a message as the command's reader does: data.text_field is --text-field there."""
    names = "|".join((*READING, *PACKING, "tokenizer"))
    text = re.sub(rf"(?<![\w./-])data\.({names})\b", lambda found: flag_of(found[1]), text)
    return re.sub(r"(?<![\w./-])data\.path( \(or data\.eval_path\))?(?![\w.])", "SOURCE", text)


def tokenizer_of(arguments: argparse.Namespace) -> str:
    """Give the tokenizer's file; ValueError, which says what for, where none is named."""
    if arguments.tokenizer is None:
        raise ValueError(
            "--tokenizer: name the tokenizer.json or the SentencePiece .model that makes tokens of the data; data of "
            "token ids need it as well: its vocabulary says which ids there may be, and shows them as text"
        )
    return arguments.tokenizer


def _yaml(flag: str, value: str, form: str) -> object:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{flag}: {value!r} isn't YAML ({error}); {form}") from None
