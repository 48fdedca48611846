"""`hsap data`: the packs of a data set as training would have them, decoded back to text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hsap.cli import settings
from hsap.cli.exit import OK
from hsap.cli.show import takes_colour
from hsap.files import sha256, short
from hsap.ir.check import printable, whole


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "data",
        help="show packs of a data set as text: documents, and what of them is trained",
        description="Show the packs that training has, step by step. Text in ⟦ ⟧ (green on a terminal) is trained: "
        "something predicts it. Control tokens are their pieces in ‹ ›; what merely spells one is in none. Flags are "
        "settings of train.py.",
    )
    settings.add_source(command)
    command.add_argument("--tokenizer", metavar="FILE", help="not needed where prepared data find theirs")
    command.add_argument("--check", action="store_true", help="compare all checksums of prepared data, show nothing")
    command.add_argument("--packs", type=int, default=2, metavar="N", help="packs to show (default 2)")
    command.add_argument("--step", type=int, default=1, metavar="S", help="the step to begin with (default 1)")
    command.add_argument(
        "--seed", type=int, default=settings.SEED, metavar="S", help=f"train.seed (default {settings.SEED})"
    )
    command.add_argument(
        "--packs-per-step",
        type=int,
        default=settings.PACKS_PER_STEP,
        metavar="N",
        help=f"train.packs_per_step (default {settings.PACKS_PER_STEP})",
    )
    command.add_argument(
        "--cache", default=settings.CACHE, metavar="DIR", help=f"data.cache of training (default {settings.CACHE})"
    )
    command.add_argument("--color", action="store_true", help="colour even where stdout is no terminal")
    settings.add_flags(command, "how documents are packed", settings.PACKING)
    settings.add_flags(command, "how rows become tokens, of data that isn't prepared", settings.READING)
    command.set_defaults(run=_data, told=settings.as_flags)


def _data(arguments: argparse.Namespace) -> int:
    from hsap.data import prepared

    path = settings.path_of(arguments.source)
    if arguments.check:
        if not prepared.is_prepared(path):
            raise ValueError(f"--check: {path} is no folder that `hsap prepare` made; leave the flag out")
        index = prepared.check(path)
        print(f"{path}: sound; {index.content}")
        return OK
    for line in _lines(arguments, path):
        print(line)
    return OK


def _lines(arguments: argparse.Namespace, path: Any) -> Iterator[str]:
    from hsap.cli.packs import CLOSE, LEGEND, OPEN, step_lines
    from hsap.data import prepared
    from hsap.data.opening import marker_notice, open_tokenizer
    from hsap.data.packing import PackStream, count_long
    from hsap.data.read import read_store

    is_prepared = prepared.is_prepared(path)
    given = [name for name in settings.READING if getattr(arguments, name) is not None]
    if is_prepared and given:
        raise ValueError(
            f"--{given[0].replace('_', '-')}: {path} is prepared, its rows have become tokens; leave it out"
        )
    file = (
        _tokenizer_of(path, prepared.read_index(path), arguments.tokenizer)
        if is_prepared
        else settings.tokenizer_of(arguments)
    )
    data = replace(settings.read(arguments, path, file), cache=arguments.cache)
    packing, tokenizer = data.as_packing(), open_tokenizer(data)
    packs = whole("--packs", arguments.packs, 0)
    # What training has prepared is taken as it is; looking at data writes nothing.
    found = None if is_prepared else prepared.find_cached(data, path, arguments.seed)
    store, index = read_store(replace(data, cache=None), found or path, arguments.seed)
    stream = PackStream(store.lengths, packing, arguments.packs_per_step, arguments.seed, store.uncut)
    stream.seek(whole("--step", arguments.step))
    yield f"{printable(path)}: {len(store.ids):,} documents, {len(store.tokens):,} tokens"
    notices = (index.left_out.told(), marker_notice(data, tokenizer, index.recipe))
    long = count_long(store.lengths, store.uncut, packing, index.chats)
    for told in (*map(str, long), *map(printable, notices)):
        if told:
            yield settings.as_flags(told)
    colour = arguments.color or takes_colour()
    if packs:
        yield LEGEND.format("green" if colour else f"{OPEN} {CLOSE}")
    while packs > 0:
        step = next(stream)
        yield ""
        yield from step_lines(store, tokenizer, step, packs, colour)
        packs -= len(step.packs)


def _tokenizer_of(folder: Any, index: Any, given: str | None) -> str:
    """Say which tokenizer prepared data are shown with: theirs, which is where it was, or which somebody names."""
    from hsap.data.tokenizer import tokenizer_file

    recipe = index.recipe["tokenizer"]
    file = tokenizer_file(recipe["file"] if given is None else given)
    if not file.is_file():
        raise ValueError(f"{folder} was prepared with {recipe['file']}, and {file} isn't there; give it in --tokenizer")
    digest = sha256(file)
    if digest != recipe["sha256"]:
        raise ValueError(
            f"{folder} was prepared with {recipe['file']} ({short(recipe['sha256'])}), and {file} is another "
            f"({short(digest)}); give the right one in --tokenizer"
        )
    return str(file)
