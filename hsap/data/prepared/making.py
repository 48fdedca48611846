"""Prepare: read a source once, tokenise it in parallel, and put it on the disk shard by shard.

Blocks of documents are made by what the documents hold, and shards of whole blocks: neither depends on the number of
workers, so that the same source and settings give the same bytes. What is left out is counted by reason, in the order
of the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsap.data.config import READING, DataConfig
from hsap.data.document import Document
from hsap.data.opening import open_data, open_template, open_tokenizer
from hsap.data.prepared.checking import check
from hsap.data.prepared.index import FORMAT, INDEX, TOKEN_DTYPES, VERSION, Index, Shard, read_index
from hsap.data.prepared.recipe import template_recipe, tokenizer_recipe
from hsap.data.prepared.shards import Growing, begun, clear, publish, same_work
from hsap.data.prepared.workers import tokenised
from hsap.data.sources import Tally
from hsap.data.sources.extent import fingerprint
from hsap.data.sources.several import DataSet
from hsap.data.sources.source import EXAMPLES
from hsap.data.store import DocumentStore
from hsap.data.tokenizer import Tokenizer
from hsap.ir.check import Refused, whole

SHARD_TOKENS = 1 << 25
SHARD_DOCUMENTS = 1 << 20
"""A shard ends with the block in which it gets so many tokens or documents: its tokens are in memory while it grows."""
BLOCK_CHARACTERS = 1 << 18
BLOCK_DOCUMENTS = 1 << 10
_TOKEN_CHARACTERS, _CHAT_CHARACTERS = 4, 4096
"""What a token of a tokenised document and a chat count as, in characters."""
Progress = Callable[[int, int], None]
"""Told how many documents and tokens there are by now."""


def prepare(
    data: DataConfig,
    out: str | Path,
    workers: int = 1,
    seed: int = 0,
    progress: Progress = lambda documents, tokens: None,
    shard_tokens: int = SHARD_TOKENS,
    work: Mapping[str, Any] | None = None,
) -> Index:
    """Tokenise the data set that data.path names into the folder `out`, or go on with it; gives its index.

    seed: of the order of a mixture. work: what `work_of` gave when `out` was named after it. Done is done: for a folder
    that this command has finished nothing is read but its index. Errors (ValueError): what the source refuses; no
    document that can be trained on; a folder that holds other things; files or settings that aren't those that the
    folder was begun with. OSError: the folder can't be written; it names the file, and what is whole stays.
    """
    workers, out = whole("--workers", workers, 1, 1 << 10), Path(out)
    tokenizer = open_tokenizer(data)
    source = open_data(data, data.path, seed)
    _apart(source, out)
    settled, work = work, work_of(data, seed, source, tokenizer, whole("shard_tokens", shard_tokens))
    if settled not in (None, work):
        raise Refused(f"{data.path}, its tokenizer or chat template has just changed; run the same command again")
    if (out / INDEX).is_file():
        index = read_index(out)
        same_work(out, {**work, "settings": index.settings, "source": index.source}, work)
        clear(out)
        return index
    with begun(out, work) as finished:
        shards, left_out = map(list, zip(*finished)) if finished else ([], [])
        for growing in _grown(source, data, workers, work, shards, progress):
            # Before each: a shard that is whole stays, even if the files become what they were.
            _check_unchanged(data, seed, source, out, work)
            shards.append(growing.write(out, len(shards), work["token_dtype"]))
            left_out.append(growing.left_out)
        _check_unchanged(data, seed, source, out, work)
        publish(out, _index(data, work, tokenizer, source, shards, left_out))
    return check(out)


def _check_unchanged(data: DataConfig, seed: int, source: DataSet, out: Path, work: Mapping[str, Any]) -> None:
    """Refuse files, a tokenizer or a template that aren't those any more that a folder was begun with."""
    now = work_of(data, seed, source, open_tokenizer(data), work["settings"]["shard_tokens"])
    if now["source"] != work["source"]:
        raise Refused(
            f"{data.path} has changed while it was read, and {out} may hold a part of what it was; "
            f"remove {out}, and run the same command again"
        )
    if now != work:
        raise Refused(
            f"the tokenizer or the chat template of {data.path} has changed while that was read; remove {out}, and run "
            f"the same command again"
        )


def read_whole(data: DataConfig, seed: int = 0) -> tuple[DocumentStore, Index]:
    """Tokenise the data set that data.path names into memory; gives it, and the index that it would have on the disk.

    seed: of the order of a mixture. Errors (ValueError): what the source refuses; no document that can be trained on.
    """
    tokenizer = open_tokenizer(data)
    source = open_data(data, data.path, seed)
    work = work_of(data, seed, source, tokenizer, SHARD_TOKENS)
    parts, shards, left_out = [], [], []
    for growing in _grown(source, data, 1, work, []):
        parts += growing.parts
        shards.append(growing.measured(work["token_dtype"]))
        left_out.append(growing.left_out)
    index = _index(data, work, tokenizer, source, shards, left_out)
    return DocumentStore.joined(parts), index


def work_of(data: DataConfig, seed: int, source: DataSet, tokenizer: Tokenizer, shard_tokens: int) -> dict[str, Any]:
    """Say what is prepared from what, and how: whoever goes on with a folder must have the same."""
    dtype = next(name for name, size in TOKEN_DTYPES.items() if tokenizer.vocab_size <= size)
    settings = {f"data.{name}": getattr(data, name) for name in READING}
    # By what they hold: they may move, but not change. A template that is none is told when the first chat comes.
    recipe = tokenizer_recipe(tokenizer)
    try:
        template = template_recipe(open_template(data, tokenizer))
    except ValueError:
        if data.chat_template is not None:
            raise
        template = None
    named = "" if data.chat_template is None else "named, "
    told = template and f"{named}sha256 {template['sha256']}"
    contents = {"data.tokenizer": f"sha256 {recipe['sha256']}", "data.chat_template": told}
    return {
        "format": FORMAT,
        "version": VERSION,
        "token_dtype": dtype,
        "settings": {"data.path": data.path, **settings, **contents, "train.seed": seed, "shard_tokens": shard_tokens},
        "source": fingerprint(source),
    }


def _apart(source: DataSet, out: Path) -> None:
    """Refuse a folder inside a source tree, of which it would become a part."""
    for part in source.parts:
        if part.format in ("source_tree", "source_trees", "mds", "text") and out.resolve().is_relative_to(
            Path(part.path).resolve()
        ):
            raise Refused(
                f"{out} lies inside {part.path}, all of which is read; name one elsewhere (in training: data.cache)"
            )


def _blocks(source: DataSet, skip: int, counted: deque[list[bool]]) -> Iterator[list[Document]]:
    """Walk the documents behind the first `skip` in blocks that are about the same work.

    counted: gets, for each block, whether its documents are there for the first time; a mixture gives some again, and
    if one of these is left out that is no other document.
    """
    block: list[Document] = []
    characters, first = 0, []
    for number, document in enumerate(source):
        if number < skip:
            continue
        block.append(document)
        first.append(not source.again)
        characters += _characters(document)
        if characters >= BLOCK_CHARACTERS or len(block) >= BLOCK_DOCUMENTS:
            counted.append(first)
            yield block
            block, characters, first = [], 0, []
    if block:
        counted.append(first)
        yield block


def _characters(document: Document) -> int:
    if document.chat is not None:
        return _CHAT_CHARACTERS
    return len(document.text or "") if document.tokens is None else _TOKEN_CHARACTERS * len(document.tokens)


def _grown(
    source: DataSet,
    data: DataConfig,
    workers: int,
    work: Mapping[str, Any],
    shards: Sequence[Shard],
    progress: Progress = lambda documents, tokens: None,
) -> Iterator[Growing]:
    """Tokenise what is behind the shards that are there; gives it shard by shard."""
    counted: deque[list[bool]] = deque()
    blocks = tokenised(_blocks(source, sum(shard.read for shard in shards), counted), data, workers)
    documents, tokens = (sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens"))
    growing = Growing()
    progress(documents, tokens)
    for block in blocks:
        first = counted.popleft()
        growing.add(block.store, block.read, block.chats)
        for which, *told in block.left_out:
            if first[which]:
                growing.left_out.reject(*told)
        documents, tokens = documents + len(block.store.ids), tokens + len(block.store.tokens)
        progress(documents, tokens)
        if growing.tokens >= work["settings"]["shard_tokens"] or growing.read >= SHARD_DOCUMENTS:
            yield growing
            growing = Growing()
    if growing.read:
        yield growing


def _all_left_out(source: DataSet, of_shards: Sequence[Tally]) -> Tally:
    """Add up what the source and tokenising left out, with as many examples as one walk would give."""
    total = Tally.of((source.tally, *of_shards))
    told: dict[str, list[Any]] = {}
    for example in total.examples:
        told.setdefault(example.reason, []).append(example)
    total.examples = [example for examples in told.values() for example in examples[:EXAMPLES]]
    return total


def _index(
    data: DataConfig,
    work: dict[str, Any],
    tokenizer: Tokenizer,
    source: DataSet,
    shards: Sequence[Shard],
    left_out: Sequence[Tally],
) -> Index:
    tally = _all_left_out(source, left_out)
    if not any(shard.documents for shard in shards):
        by_template = any(reason.startswith("the chat template") for reason in tally.counts)
        do = "set data.chat_template to one that has a form for them" if by_template else "mend what is left out"
        raise Refused(f"{data.path} gives no document: {tally.told()}; {do}, or set data.path to other data")
    chats = any(shard.chats for shard in shards)
    template = template_recipe(open_template(data, tokenizer)) if chats else None
    recipe = {
        "tokenizer": tokenizer_recipe(tokenizer),
        "chat_template": template,
        "loss": data.loss if template is not None else None,
    }
    tally.num_documents, tokens = (sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens"))
    settings, of = work["settings"], work["source"]
    return Index(tally.num_documents, tokens, work["token_dtype"], recipe, settings, of, tally, tuple(shards))
