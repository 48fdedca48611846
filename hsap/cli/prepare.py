"""`hsap prepare`: tokenise a data set once, in parallel, into a folder that training maps into memory."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsap.children import ended_on_sigterm
from hsap.cli import settings
from hsap.cli.exit import OK
from hsap.cli.lengths import histogram, percentiles
from hsap.ir.check import Refused, printable

_WIDTH = 80


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "prepare",
        help="tokenise data once, in parallel, into a folder for data.path",
        description="Tokenise data once. Ended at any moment, the same command goes on where it was. Flags are "
        "settings of train.py: --text-field is data.text_field, with the same default.",
    )
    settings.add_source(command)
    command.add_argument("-o", "--out", required=True, metavar="DIR", help="the folder: new, or begun by this command")
    command.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json or a SentencePiece .model; always needed")
    command.add_argument("--workers", type=int, metavar="N", help="processes that tokenise (default: one a core)")
    command.add_argument("--seed", type=int, default=settings.SEED, metavar="S", help="train.seed, of mixtures")
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    settings.add_flags(command, "how rows become tokens", settings.READING)
    command.set_defaults(run=_prepare, told=settings.as_flags)


def _prepare(arguments: argparse.Namespace) -> int:
    from hsap.data import prepared
    from hsap.data.opening import marker_notice, open_tokenizer

    data = settings.read(arguments, settings.path_of(arguments.source), settings.tokenizer_of(arguments))
    workers = len(os.sched_getaffinity(0)) if arguments.workers is None else arguments.workers
    with ended_on_sigterm(), prepared.Progress("hsap prepare") as progress:
        try:
            index = prepared.prepare(data, arguments.out, workers, arguments.seed, progress)
        except OSError as error:
            if error.filename is None or not Path(error.filename).is_relative_to(arguments.out):
                raise
            raise Refused(
                f"{error.filename} can't be written ({error.strerror}); make room, or mend what is said, and run the "
                f"same command again: it goes on where it was"
            ) from error
    figures = _figures(index, prepared.open_store(arguments.out).lengths)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(_report(arguments, index, figures, histogram(prepared.open_store(arguments.out).lengths)))
    if notice := marker_notice(data, open_tokenizer(data), index.recipe):
        print(f"hsap prepare: {settings.as_flags(printable(notice))}", file=sys.stderr)
    return OK


def _figures(index: Any, lengths: Any) -> dict[str, Any]:
    return {
        "documents": index.documents,
        "tokens": index.tokens,
        "trained_tokens": sum(shard.trained for shard in index.shards),
        "token_dtype": index.token_dtype,
        "bytes": sum(file.bytes for shard in index.shards for file in shard.columns.values()),
        "shards": len(index.shards),
        "percentiles": percentiles(lengths),
        "longest": int(lengths.max(initial=0)),
        "left_out": _reasons(index.left_out.counts, index.left_out.examples),
        "trained_in_part": _reasons(index.left_out.notes, index.left_out.examples),
        "content": index.content,
    }


def _reasons(counts: Mapping[str, int], examples: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"reason": name, "documents": count, "examples": [one.where for one in examples if one.reason == name]}
        for name, count in counts.items()
    ]


def _report(arguments: argparse.Namespace, index: Any, figures: dict[str, Any], chart: list[str]) -> str:
    f = figures
    share, mean = f["trained_tokens"] / max(f["tokens"], 1), f["tokens"] / max(f["documents"], 1)
    trained = "" if f["trained_tokens"] == f["tokens"] else f" ({share:.1%} trained)"
    ranks = ", ".join(f"{name} {value:,}" for name, value in f["percentiles"].items())
    lines = [
        *_wrapped(
            f"{arguments.out}: {f['documents']:,} documents, {f['tokens']:,} tokens{trained}, {f['bytes']:,} bytes "
            f"({f['token_dtype']}, shards: {f['shards']})"
        ),
        *_wrapped(f"tokens of a document: {ranks}, longest {f['longest']:,}, mean {mean:,.1f}"),
        "",
        *chart,
    ]
    for name, told in (("left_out", "left out"), ("trained_in_part", "trained only in part")):
        if f[name]:
            lines += ["", f"{told}: {sum(one['documents'] for one in f[name]):,}"]
        for one in f[name]:
            more = ", …" if one["documents"] > len(one["examples"]) else ""
            reason = settings.as_flags(one["reason"])
            lines += _wrapped(f"{one['documents']:>9,}  {reason} ({', '.join(one['examples'])}{more})", 11)
    return "\n".join([*lines, "", f"train.py {' '.join(_settings(arguments, index))}"])


def _settings(arguments: argparse.Namespace, index: Any) -> list[str]:
    """Give what training has to be told: a run that reads these data otherwise is refused."""
    names = ["add_bos", "add_eos", "bos", "eos"] + (["chat_template", "loss"] if index.recipe["chat_template"] else [])
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    words = {"path": Path(arguments.out), "tokenizer": arguments.tokenizer, **given}
    return [f"data.{name}={value}" for name, value in words.items()]


def _wrapped(text: str, indent: int = 2) -> list[str]:
    # Places and reasons hold names that others gave.
    line = text[: len(text) - len(text.lstrip())] + printable(text)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
