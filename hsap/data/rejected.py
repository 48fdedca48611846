"""Rejected: a document that is left out and counted, while the rest of its data set is trained on."""

from __future__ import annotations


class Rejected(ValueError):
    """One document that can't be trained on; the rest of its data set can.

    where: "path:line". reason: a few words that say the kind of fault and nothing of this document, to count by. The
    message has both, and what this document's fault is.
    """

    def __init__(self, where: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{where}: {reason}{f' ({detail})' if detail else ''}")
        self.where = where
        self.reason = reason
