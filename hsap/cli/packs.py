"""Packs: what a step trains on, as text in which trained tokens are marked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hsap.data.batch import MicroBatch, build_micro_batch
from hsap.data.packing import Pack, StepPacks
from hsap.data.store import DocumentStore
from hsap.data.tokenizer import Tokenizer
from hsap.ir.check import one_line
from hsap.targets import NO_TARGET

OPEN, CLOSE = "⟦", "⟧"
CONTROL = "‹{}›"
"""How a control token is shown: words that spell it look otherwise."""
LEGEND = "{} is trained; " + CONTROL.format("…") + " is a control token, the same spelling without it is words"
"""What signs mean; for: how trained text is shown."""
_GREEN, _DIM, _BOLD, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTEXT = 16
"""Tokens before a run that it is decoded with: some tokenizers write a space, or a character, over two tokens."""
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069‹›⟦⟧]")
"""What a terminal would act on, and the signs that only we may write."""
_STYLES = r"(?:\x1b\[\d*m|[⟦⟧])*"
_LIKE_HEADS = re.compile(rf"^({_STYLES})([=\-.])(?=\2\2 .* \2{{3}}{_STYLES}[^\S\n]*$)", re.MULTILINE)
"""A line of a document that looks like one of `_head`, whatever stands before and behind it; its first character."""


def step_lines(store: DocumentStore, tokenizer: Tokenizer, step: StepPacks, packs: int, colour: bool) -> Iterator[str]:
    """Show the first packs of a step, document by document, as the batches of training hold them."""
    for number, pack in enumerate(step.packs[:packs], 1):
        batch = build_micro_batch(store, [pack], step.pack_tokens)
        name = f"step {step.step}, pack {number} of {len(step.packs)}"
        yield _head(
            f"{name}: {len(batch.tokens):,} of {step.pack_tokens:,} tokens, documents: {len(pack):,}, "
            f"{batch.num_targets:,} trained",
            "=",
            colour,
        )
        yield from _pieces(store, tokenizer, pack, batch, colour)


def _pieces(store: DocumentStore, tokenizer: Tokenizer, pack: Pack, batch: MicroBatch, colour: bool) -> Iterator[str]:
    row = 0
    for number, piece in enumerate(pack):
        rows = slice(row, row + piece.num_tokens)
        row = rows.stop
        tokens, labels = batch.tokens[rows], batch.labels[rows]
        trained = np.concatenate([[False], labels[:-1] != NO_TARGET])
        of = int(store.starts[piece.document + 1] - store.starts[piece.document])
        part = f"{of:,} tokens" if piece.num_tokens == of else f"tokens {piece.start:,} to {piece.stop:,} of {of:,}"
        name = one_line(batch.document_ids[number])
        yield _head(f"{number + 1}. {name}: {part}, {int((labels != NO_TARGET).sum()):,} trained", "-", colour)
        answers = batch.answers[number] if batch.answers else ()
        borders = [0, *answers, piece.num_tokens]
        for i, (first, last) in enumerate(pairwise(borders)):
            if i:
                yield _head(f"answer {i} of {len(answers)}, behind the question; sees no other answer", ".", colour)
            yield marked(runs(tokenizer, tokens[first:last].tolist(), trained[first:last]), colour)
        if labels[-1:].tolist() not in ([], [NO_TARGET]):
            after = "".join(text for text, *_ in runs(tokenizer, labels[-1:].tolist(), np.ones(1, bool)))
            yield _head(f"goes on in another pack; its next token, {shown_text(after)!r}, is trained here", ".", colour)


def runs(tokenizer: Tokenizer, tokens: Sequence[int], trained: np.ndarray) -> Iterator[tuple[str, bool, bool]]:
    """Decode tokens in runs that are all trained, or all not: text, whether it is trained, whether a control token.

    Control tokens, which decoding leaves out, come alone, as their pieces. A character whose tokens lie on both sides
    of a border is in the run behind it.
    """
    pieces = {token.id: piece for piece, token in tokenizer.control_tokens.items()}
    controls = np.isin(tokens, list(pieces))
    changes = np.flatnonzero((trained[1:] != trained[:-1]) | controls[1:] | controls[:-1]) + 1
    borders = [0, *changes.tolist(), len(tokens)] if len(tokens) else []
    begin = 0
    for start, stop in pairwise(borders):
        if controls[start]:
            yield pieces[tokens[start]], bool(trained[start]), True
            begin = stop
            continue
        first = max(begin, start - _CONTEXT)
        before = tokenizer.decode(tokens[first:start]).rstrip("\ufffd") if first < start else ""
        text = tokenizer.decode(tokens[first:stop])
        text = text[len(before) :] if text.startswith(before) else tokenizer.decode(tokens[start:stop])
        if stop < len(tokens) and not controls[stop]:
            text = text.rstrip("\ufffd")
        yield text, bool(trained[start]), False


def marked(parts: Iterator[tuple[str, bool, bool]], colour: bool) -> str:
    """Join runs to one text: control tokens in ‹ ›, dim; trained ones green, without colours in ⟦ ⟧."""
    text, inside = [], False
    for part, trained, control in parts:
        shown = CONTROL.format(shown_text(part)) if control else shown_text(part)
        if colour:
            style = (_GREEN if trained else "") + (_DIM if control else "")
            text.append(f"{style}{shown}{_PLAIN}" if style else shown)
            continue
        if trained != inside:
            text.append(OPEN if trained else CLOSE)
            inside = trained
        text.append(shown)
    whole = "".join([*text, CLOSE if inside else ""])
    return _LIKE_HEADS.sub(lambda found: f"{found[1]}\\x{ord(found[2]):02x}", whole)


def shown_text(text: str) -> str:
    """Give text with line breaks and tabs as they are, and everything else that would mislead escaped."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)


def _head(text: str, line: str, colour: bool) -> str:
    head = f"{line * 3} {text} {line * 3}"
    return f"{_BOLD}{head}{_PLAIN}" if colour else head
