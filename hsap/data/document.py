"""Document: what a source gives, and the sample of token ids that becomes of it before it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hsap.data.chat.conversation import Conversation, SharedQuestion

NO_TARGET = -100
"""The label of a token that nothing is predicted from (PyTorch's default ignore_index)."""


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
