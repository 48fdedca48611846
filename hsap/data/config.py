"""The data settings of a run, `data.` in its configuration; the commands that look at data have the same ones."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hsap.data.chat.template import LOSSES
from hsap.data.packing.settings import LONG_DOCUMENTS, POLICIES, Packing
from hsap.data.sources import DTYPES, FORMATS
from hsap.data.sources.mixture import WHEN_EXHAUSTED
from hsap.keys import choice, flag, integer, is_integer, is_number, read, rule, text

_DEFAULTS = Path(__file__).resolve().parents[1] / "configs" / "data" / "demo.yaml"
"""A link to the repository's configs; in an installed package the file itself."""


OF_ROWS = (
    *("format", "text_field", "tokens_field", "labels_field", "id_field", "token_dtype", "end_id", "begin_id"),
    "chat_fields",
)
"""What of a file is read as which document."""
OF_ENDS = ("add_bos", "add_eos", "bos", "eos")
"""What stands around every document."""
OF_CHATS = ("chat_template", "chat_date", "loss", "answers", "trees")
"""What chats become, and what of them is trained."""
OF_MIXTURES = ("exhausted",)
READING = (*OF_ROWS, *OF_ENDS, *OF_CHATS, *OF_MIXTURES)
"""All that says, beside path and tokenizer, what tokens a data set becomes."""
OF_PACKS = ("pack_tokens", "packing", "long_documents", "max_document_tokens", "max_delay_steps", "curriculum")
"""How documents become packs."""


def _is_date(value: object) -> bool:
    try:
        return isinstance(value, str) and len(value) == 10 and bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


def _is_names(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, str) and one for pair in value.items() for one in pair)


def _is_curriculum(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_stage(stage) for stage in value)


def _is_paths(value: object) -> bool:
    names = value if isinstance(value, (list, tuple, Mapping)) else [value]
    weights = value.values() if isinstance(value, Mapping) else ()
    sound = all(isinstance(name, str) and bool(name.strip()) for name in names) and len(set(names)) == len(names)
    return bool(names) and sound and all(is_number(weight) and weight > 0 for weight in weights)


def _is_stage(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(is_integer(v) and v >= 0 for v in value)


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where tokens come from, how they are packed and prepared ahead; workers is never null in a TrainConfig."""

    path: str | Sequence[str] | Mapping[str, float] = rule(
        "a file or a directory, or several with their weights, or a list of several", _is_paths
    )
    eval_path: str | None = text("a file or a directory", optional=True)
    format: str | None = choice(*FORMATS, optional=True)
    tokenizer: str = text("the path of a tokenizer.json or of a SentencePiece .model")
    text_field: str | None = text("the field of a row that holds its text", optional=True)
    tokens_field: str | None = text("the field of a row that holds its token ids", optional=True)
    labels_field: str | None = text("the field of a row that holds its labels", optional=True)
    id_field: str | None = text("the field of a row that holds its name", optional=True)
    token_dtype: str | None = choice(*DTYPES, optional=True)
    end_id: int | None = integer(0, optional=True)
    begin_id: int | None = integer(0, optional=True)
    exhausted: str = choice(*WHEN_EXHAUSTED)
    add_bos: bool | None = flag(optional=True)
    add_eos: bool | None = flag(optional=True)
    bos: str | None = text("a piece of the tokenizer", optional=True)
    eos: str | None = text("a piece of the tokenizer", optional=True)
    chat_template: str | None = text("chatml, llama2, mistral, or a file", optional=True)
    chat_date: str = rule("a day, like '2024-07-26' in quotes", _is_date)
    chat_fields: Mapping[str, str] = rule("names of fields, like {messages: talk}", _is_names)
    loss: str = choice(*LOSSES)
    answers: str = choice("all", "best")
    trees: str = choice("all", "best")
    pack_tokens: int = integer(1)
    packing: str = choice(*POLICIES)
    long_documents: str = choice(*LONG_DOCUMENTS)
    max_document_tokens: int | None = integer(1, optional=True)
    max_delay_steps: int = integer(1)
    curriculum: tuple[tuple[int, int], ...] | None = rule(
        "a list of [step, pack_tokens], like [[1000,32768],[3000,131072]]", _is_curriculum, optional=True
    )
    cache: str | None = text("a directory", optional=True)
    lookahead: int = integer(0)
    workers: int | None = integer(0, optional=True)

    def as_packing(self) -> Packing:
        """Give the part of the settings that says how documents become packs."""
        return Packing(
            self.pack_tokens,
            self.packing,
            long_documents=self.long_documents,
            max_document_tokens=self.max_document_tokens,
            max_delay_steps=self.max_delay_steps,
            curriculum=self.curriculum or (),
        )


def data_config(given: Mapping[str, object]) -> DataConfig:
    """Make settings of some values, path and tokenizer among them, with the defaults of training for the others.

    ValueError: an unknown name, or a value that isn't allowed.
    """
    defaults = yaml.safe_load(_DEFAULTS.read_text(encoding="utf-8")) | {"eval_path": None}
    return read(DataConfig, "data.", defaults | given)
