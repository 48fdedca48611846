"""Opening: a data set, its tokenizer and its chat template, as the data settings say."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsap.data import sources
from hsap.data.chat import markers, rows
from hsap.data.chat.template import SHIPPED, Template, load_template
from hsap.data.config import DataConfig
from hsap.data.fields import Fields
from hsap.data.sources.mixture import Mixture
from hsap.data.sources.several import DataSet, Several
from hsap.data.sources.source import Source
from hsap.data.tokenizer import Tokenizer, load_tokenizer


def open_data(data: DataConfig, path: str | Sequence[str] | Mapping[str, float], seed: int = 0) -> DataSet:
    """Open a data set, several one after the other, or several with weights; no row is read.

    seed: of the order in which they are mixed. ValueError: what `sources.open` refuses.
    """
    if isinstance(path, Mapping):
        return Mixture({name: _opened(data, name) for name in path}, path, seed, data.exhausted)
    if not isinstance(path, str):
        return Several({name: _opened(data, name) for name in path})
    return _opened(data, path)


def _opened(data: DataConfig, path: str) -> Source:
    chats = rows.ChatFields.named(data.chat_fields, data.trees, data.answers)
    fields = Fields(
        text=data.text_field,
        tokens=Fields().tokens if data.tokens_field is None else (data.tokens_field,),
        labels=data.labels_field,
        id=data.id_field,
        chat_of=functools.partial(rows.chat_of, fields=chats),
        chat_names=chats.names,
        # A template that somebody names says that the chats are meant; one beside the tokenizer says nothing of data.
        chats_first=data.chat_template is not None,
    )
    return sources.open(
        path, fields, format=data.format, token_dtype=data.token_dtype, end_id=data.end_id, begin_id=data.begin_id
    )


def open_tokenizer(data: DataConfig) -> Tokenizer:
    """Load the tokenizer with its BOS and EOS policy."""
    return load_tokenizer(data.tokenizer, data.add_bos, data.add_eos, data.bos, data.eos)


def open_template(data: DataConfig, tokenizer: Tokenizer) -> Template | None:
    """Load the template that chats become text by, None where there is none; ValueError for one that is none."""
    return load_template(data.chat_template, tokenizer, data.loss, datetime.date.fromisoformat(data.chat_date))


def marker_notice(data: DataConfig, tokenizer: Tokenizer, recipe: Mapping[str, Any]) -> str:
    """Say which markers of the chats' template the tokenizer reads as words; empty where it knows them all.

    recipe: how documents became tokens, of prepared data, whose template need not be named again. Empty as well where
    there are no chats, and where their template isn't at hand.
    """
    was = recipe["chat_template"]
    if was is None:
        return ""
    if data.chat_template is None and was["name"] in SHIPPED:
        data = replace(data, chat_template=was["name"])
    template = open_template(data, tokenizer)
    return "" if template is None or Path(template.renderer.name).name != was["name"] else markers.told(template)
