"""Template: from a conversation to token ids and which of them are trained.

The rendered text is cut at the control tokens that the template wrote, and at both ends of every assistant's turn; the
parts are tokenised one by one. So the prompt before an answer is tokenised as it is when the model is asked, without
the answer, no token lies half in what is trained, and what was said never becomes a control token, whatever it spells.
Offsets, which `tokenizers` gives, aren't needed for that, and SentencePiece works alike: parts behind a cut inside text
are encoded without the space that it puts before text (`Tokenizer.encode_part`).

The BOS and EOS policy of documents doesn't hold here: a chat has those that its template writes.
"""

from __future__ import annotations

import datetime
import itertools
import json
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from hsap.data.chat import shared_question
from hsap.data.chat.conversation import SURROGATE
from hsap.data.chat.encoded import Encoded
from hsap.data.chat.render import Refusal, Renderer
from hsap.data.chat.spans import Control, Controls, Rendered, Span, render
from hsap.data.document import Conversation, Sample, SharedQuestion, Turn
from hsap.data.rejected import Rejected
from hsap.data.tokenizer import After, Tokenizer

SHIPPED = ("chatml", "llama2", "mistral")
LOSSES = ("assistant", "last_assistant", "weighted", "all")
"""What is trained: every assistant's turn that the data doesn't give weight 0; the last one only; turns of anybody
that the data gives weight 1; all tokens."""

_FOLDER = Path(__file__).parent / "templates"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Template:
    """A chat template with the tokenizer that it is for; made by `load_template`. loss: one of `LOSSES`."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, loss: str) -> None:
        self.renderer, self.tokenizer, self.loss = renderer, tokenizer, loss
        self._controls = Controls(tokenizer.control_tokens)
        # What is unknown to the tokenizer gets <unk>, from text too.
        self._never = {token.id for token in tokenizer.control_tokens.values()} - {tokenizer.unk_id}

    def sample(self, id: str, chat: Conversation | SharedQuestion, where: str) -> Sample:
        """Give the sample of a conversation, or of a question with several answers; `Rejected`: why there is none."""
        if isinstance(chat, SharedQuestion):
            encoded = [self.encode(one, where) for one in chat.conversations]
            return shared_question.sample(id, encoded, len(chat.question), where)
        encoded = self.encode(chat, where)
        if not encoded.trained[1:].any():
            raise Rejected(where, "nothing in it is trained", f"data.loss is {self.loss}")
        return Sample(id, encoded.tokens, encoded.trained)

    def encode(self, conversation: Conversation, where: str) -> Encoded:
        """Give the tokens of a conversation; `Rejected`: why the template or the tokenizer has no form for it."""
        trained = {i for i, turn in enumerate(conversation.turns) if self._is_trained(conversation.turns, i, turn)}
        try:
            rendered = render(self.renderer, conversation, self._controls, set() if self.loss == "all" else trained)
            rendered.open.encode()
            return self._encode(rendered, trained)
        except Refusal as refusal:
            raise Rejected(where, refusal.reason, refusal.detail) from refusal
        except UnicodeEncodeError as error:
            # Turns are checked as they are read; of calls and tools it is seen here.
            raise Rejected(where, SURROGATE) from error
        except OverflowError as error:
            raise Rejected(where, "the chat is too long", str(error)) from error

    def _is_trained(self, turns: tuple[Turn, ...], i: int, turn: Turn) -> bool:
        if self.loss == "weighted":
            return bool(turn.weight)
        spoken = turn.role == "assistant" and turn.weight != 0
        return spoken and (self.loss != "last_assistant" or i == len(turns) - 1)

    def _encode(self, rendered: Rendered, trained: set[int]) -> Encoded:
        found = self._controls.find(rendered.text)
        controls = {control.start: control for control in found}
        spans = {}
        for span in rendered.spans:
            start, stop = (_outside(cut, found) for cut in (span.start, span.stop))
            spans[start] = Span(span.turn, start, stop)
        borders = {0, len(rendered.text), *controls, *(control.stop for control in found)}
        borders = sorted(borders.union(spans, (span.stop for span in spans.values())))
        tokens: list[int] = []
        marks: list[bool] = []
        begins: dict[int, int] = {}
        after: After = "start"
        current = Span(-1, 0, 0)
        for start, end in itertools.pairwise(borders):
            if start in spans:
                current = spans[start]
                begins[current.turn] = len(tokens)
            counts = self.loss == "all" or (current.turn in trained and start < current.stop)
            if start in controls:
                part, after = [controls[start].id], "control"
            else:
                part = self.tokenizer.encode_part(rendered.open[start:end], after)
                if not self._never.isdisjoint(part):
                    raise Refusal("words that the tokenizer reads as a control token")
                after = "text"
            tokens += part
            marks += [counts] * len(part)
        return Encoded(np.array(tokens, dtype=np.int32), np.array(marks, dtype=bool), begins)


def _outside(cut: int, controls: list[Control]) -> int:
    """Move a cut out of the whitespace that a control token swallows, to the side of the token it is on."""
    before = bisect_left(controls, cut, key=lambda control: control.start) - 1
    if before < 0 or cut >= controls[before].stop:
        return cut
    return controls[before].stop if cut > controls[before].core else controls[before].start


def load_template(
    name: str | None, tokenizer: Tokenizer, loss: str = "assistant", day: datetime.date = datetime.date(2024, 7, 26)
) -> Template | None:
    """Load a chat template for a tokenizer.

    name: one of `SHIPPED`; a file with a template, or a tokenizer_config.json or a folder that has one; None: what lies
    beside the tokenizer, None if nothing does. Errors (ValueError): no such file, or no template in it.
    """
    beside = Path(tokenizer.name).parent
    if name is None:
        source = _of_folder(beside)
        if source is None:
            return None
        name = str(beside)
    elif name in SHIPPED:
        source = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    else:
        path = Path(name)
        if path.is_dir():
            source = _of_folder(path)
        elif path.is_file():
            source = _of_config(path) if path.suffix == ".json" else _text(path)
        else:
            source = None
        if source is None:
            raise ValueError(
                f"data.chat_template={name}: no chat template there; set it to {', '.join(SHIPPED)}, to a .jinja file, "
                "or to a tokenizer_config.json with a chat_template"
            )
    special = {"bos_token": tokenizer.bos or "", "eos_token": tokenizer.eos or ""} | _special(beside)
    return Template(Renderer(source, name, special, day), tokenizer, loss)


def _of_folder(folder: Path) -> str | None:
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return _text(file)
    return _of_config(config) if config.is_file() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: a chat template must be UTF-8 ({error}); repair it, or take it away") from error


def _of_config(path: Path) -> str | None:
    """Give the template in a tokenizer_config.json; of several the one that is named default."""
    template = _config(path).get("chat_template")
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def _special(folder: Path) -> dict[str, str]:
    """Give the special tokens that a tokenizer_config.json names; a token is its text or an object that has it."""
    path = folder / "tokenizer_config.json"
    values = _config(path) if path.is_file() else {}
    given = {name: values.get(name) for name in _SPECIAL}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); repair it, or take it away") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not an object; repair it, or take it away")
    return values
