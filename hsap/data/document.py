"""Document: what a source gives, and the sample of token ids that becomes of it before it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker said.

    role: system, user, assistant or tool. weight: of its loss, 0 or 1; None where the data doesn't say. reasoning: what
    an assistant thought before the content. tool_calls: {"name", "arguments"} each, with "id" where there is one. name,
    call_id: of a tool's answer.
    """

    role: str
    content: str
    weight: float | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, and the tools that were offered: JSON schemas of functions, as chat templates take them.

    unread: fields of its row that say something else than the turns do.
    """

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class SharedQuestion:
    """A question, which is all turns before the answer, and several answers to it, the best first.

    answers: for each its turns, of which the first is the assistant's. unread: as in `Conversation`.
    """

    question: tuple[Turn, ...]
    answers: tuple[tuple[Turn, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """The question with each of its answers."""
        return tuple(Conversation(self.question + answer, self.tools) for answer in self.answers)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One document: its text, its tokens where the data set is tokenised already, or what was said in a chat.

    id: the row's own id, or "file:line" with the file's bare name, so that moving a data set changes no id.
    where: "path:line", for messages.
    tokens: int64 [num_tokens], complete: BOS and EOS, if wanted, are among them. trained: bool [num_tokens], beside
    tokens, as in `Sample`. chat: a conversation, or a question with several answers. notes: what its row has besides
    that isn't trained, in words to count by.
    """

    id: str
    where: str
    text: str | None = None
    tokens: np.ndarray | None = None
    trained: np.ndarray | None = None
    chat: Conversation | SharedQuestion | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A document's token ids, ready to be stored and packed.

    tokens: int32 [num_tokens]. trained: bool [num_tokens], whether the token is a target of the loss (the first one of
    a document never is, whatever this says); None: all are. answers: rows at which the answers of a shared question
    begin, ascending; empty for every other document. A shared question is stored as the question without its last
    token, then each answer behind that token.
    """

    id: str
    tokens: np.ndarray
    trained: np.ndarray | None = None
    answers: tuple[int, ...] = field(default=())
