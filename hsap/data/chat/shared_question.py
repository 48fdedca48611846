"""Shared question: one question with several answers as one sample, in which it is stored and computed once.

The sample is the question without its last token, then each answer behind that token: q0 … qm-2 | qm-1 a0 a1 … |
qm-1 b0 b1 … . Every answer's positions begin at m - 1 and it sees the question and itself, so that its tokens are
predicted as in a sequence of their own; the question's own targets are counted once. All answers are trained alike by
the language model's loss; that one is better than another is for losses that compare them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsap.data.chat.encoded import Encoded
from hsap.data.document import Sample
from hsap.data.rejected import Rejected


def sample(id: str, encoded: Sequence[Encoded], turn: int, where: str) -> Sample:
    """Make the sample of a question's conversations, one for each answer, which begins with that turn; `Rejected`."""
    question = {one.begins[turn] for one in encoded}
    num_question = min(question)
    shared = [(one.tokens[:num_question].tolist(), one.trained[:num_question].tolist()) for one in encoded]
    if len(question) > 1 or any(part != shared[0] for part in shared):
        raise Rejected(where, "the chat template renders a question otherwise for another answer")
    if not num_question:
        raise Rejected(where, "a question without tokens")
    if not any(one.trained[1:].any() for one in encoded):
        raise Rejected(where, "nothing in it is trained")
    return join(
        id,
        encoded[0].tokens[:num_question],
        [one.tokens[num_question:] for one in encoded],
        encoded[0].trained[:num_question],
        [one.trained[num_question:] for one in encoded],
    )


def join(
    id: str,
    question: np.ndarray,
    answers: Sequence[np.ndarray],
    question_trained: np.ndarray,
    answers_trained: Sequence[np.ndarray],
) -> Sample:
    """Make the sample of a question of m >= 1 tokens and of its answers' tokens, and of which of them are trained."""
    tokens, trained, rows = [question[:-1]], [question_trained[:-1]], []
    for answer, marks in zip(answers, answers_trained, strict=True):
        rows.append(sum(map(len, tokens)))
        tokens += [question[-1:], answer]
        trained += [question_trained[-1:], marks]
    return Sample(id, np.concatenate(tokens).astype(np.int32), np.concatenate(trained), tuple(rows))
