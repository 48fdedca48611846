"""Markers: what a template writes around turns to look like a control token, and the tokenizer reads as words.

A template made for one model, used with another's tokenizer, does its work all the same: its `<|im_start|>` is several
ordinary tokens then, and nothing else tells. It may be meant so, as Llama 2's [INST] is; whoever trains has to know.
"""

from __future__ import annotations

import re

from hsap.data.chat.render import Refusal
from hsap.data.chat.template import Template
from hsap.ir.check import one_line

_LOOKS = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|</?(?:s|bos|eos|start_of_turn|end_of_turn)>|\[/?[A-Z][A-Z_]*\]")
"""Spellings of control tokens in the templates of published models."""
_NAMED = 12
"""More than any published template has."""
_TALK = (("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"), ("assistant", "e"))


def split_markers(template: Template) -> dict[str, int]:
    """Give the markers that are no token of the tokenizer, with how many tokens each takes, in order of appearance.

    One that the tokenizer has no character of counts as what it is read as, the unknown token.
    """
    tokenizer, found = template.tokenizer, {}
    for marker in _LOOKS.findall("".join(_texts(template))):
        if marker not in tokenizer.control_tokens and marker not in found:
            tokens = tokenizer.encode_part(marker, "text")
            if len(tokens) > 1 or tokens == [tokenizer.unk_id]:
                found[marker] = len(tokens)
    return found


def told(template: Template) -> str:
    """Say in one paragraph which markers are words to the tokenizer; empty where none is."""
    found = split_markers(template)
    if not found:
        return ""
    named = [f"{one_line(one)} ({f'{count} tokens' if count > 1 else 'unknown'})" for one, count in found.items()]
    counts = ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")
    return (
        f"markers of the chat template {template.renderer.name} are no tokens of {template.tokenizer.name} and are "
        f"written as words: {counts}; right if the model learnt them so, as Llama 2 did [INST]; otherwise take the "
        f"template that belongs to the tokenizer, or a tokenizer with these as special tokens"
    )


def _texts(template: Template) -> list[str]:
    """Render a chat with a system prompt and one without: a template may refuse either, and writes other markers."""
    texts = []
    for turns in (_TALK, _TALK[1:]):
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            texts.append(template.renderer(messages, (), False, False))
        except Refusal:
            continue
    return texts
