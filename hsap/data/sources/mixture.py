"""Mixture: several sources as one, in proportions that are exact over every window of documents.

After any number of windows every source has given its share of the documents to less than one document; the order
within a window is random in the seed. Shares are of documents, not of tokens: which document comes next is known before
it is tokenised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, islice
from typing import Any

import numpy as np

from hsap.data.document import Document
from hsap.data.sources.source import Source, Tally
from hsap.ir.check import number, one_of, whole

WHEN_EXHAUSTED = ("restart", "stop")
WINDOW = 1000
MAX_RATIO = 10**6
"""Of weights, where a mixture goes on until each source has ended."""


@dataclass(slots=True)
class _Part:
    """A source being walked: rounds counts its restarts; tally is of its first round, once that has ended."""

    name: str
    source: Source
    documents: Iterator[Document]
    rounds: int = 0
    tally: Tally | None = None


class Mixture:
    """Documents of several sources, mixed by weights; a source itself, which can be walked again.

    sources: by name; a document's id is its source's name and its own id, with "@2" in its source's second round.
    weights: of the same names, above 0; only their ratios count. exhausted: "restart" begins a source that has ended
    anew, until each has ended once; "stop" ends the mixture with the first that ends. Readers: open every source for
    reader (i, n); each reader then mixes its own documents in these proportions.
    Errors (ValueError): names or weights that don't fit; what the sources refuse.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float],
        seed: int = 0,
        exhausted: str = "restart",
        window: int = WINDOW,
    ) -> None:
        if not sources or set(sources) != set(weights):
            raise ValueError(
                f"a mixture has sources {', '.join(sources) or 'none'} and weights for {', '.join(weights) or 'none'}; "
                f"give each source one weight"
            )
        given = {name: Fraction(number(f"weight of {name}", weights[name])) for name in sources}
        self.shares = {name: weight / sum(given.values()) for name, weight in given.items()}
        self.exhausted = one_of("data.exhausted: mixtures have no", exhausted, WHEN_EXHAUSTED)
        least = min(given, key=given.__getitem__)
        if self.exhausted == "restart" and given[least] * MAX_RATIO < max(given.values()):
            raise ValueError(
                f"weight of {least} is {weights[least]}, less than a millionth of another's; a mixture that goes on "
                f"until each source has ended would next to never end: raise it, or take the source away"
            )
        self.window = whole("window of a mixture", window)
        self.seed = whole("seed of a mixture", seed, 0)
        self.sources = dict(sources)
        self._parts: list[Any] = []
        self._again = False

    @property
    def again(self) -> bool:
        """Whether the document given last had been given before, in an earlier round of its source."""
        return self._again

    @property
    def parts(self) -> tuple[Source, ...]:
        """Its sources."""
        return tuple(self.sources.values())

    @property
    def tally(self) -> Tally:
        """What the last walk gave and left out, over all sources; of restarted ones once, as in their first round."""
        walked = {part.name: part.tally for part in self._parts if part.tally is not None}
        return Tally.of(walked.get(name, one.tally) for name, one in self.sources.items())

    def __iter__(self) -> Iterator[Document]:
        self._again = False
        self._parts = parts = [_Part(name, source, iter(source)) for name, source in self.sources.items()]
        for part in self._order(parts):
            document = self._next(part, parts)
            if document is None:
                return
            self._again = part.rounds > 0
            again = f"@{part.rounds + 1}" if part.rounds else ""
            yield replace(document, id=f"{part.name}/{document.id}{again}")

    def _order(self, parts: list[_Part]) -> Iterator[_Part]:
        """Say, for ever, whose document is next."""
        turns = _fair(list(self.shares.values()))
        for window in count():
            order = np.array(list(islice(turns, self.window)))
            for index in np.random.default_rng([self.seed, window]).permutation(order).tolist():
                yield parts[index]

    def _next(self, part: _Part, parts: list[_Part]) -> Document | None:
        """Give a source's next document; None where the mixture ends with it."""
        document = next(part.documents, None)
        if document is not None:
            return document
        part.tally = part.tally or part.source.tally
        if self.exhausted == "stop" or all(one.tally is not None for one in parts):
            return None
        part.rounds += 1
        part.documents = iter(part.source)
        document = next(part.documents, None)
        if document is None:
            # A reader of many may have no document of a small source; the others have them.
            raise ValueError(f"source {part.name} of the mixture has no document for this reader; use fewer readers")
        return document


def _fair(shares: list[Fraction]) -> Iterator[int]:
    """Deal turns so that after n of them, whatever n, each has had its share of n to less than one turn.

    R. Tijdeman, The chairman assignment problem, 1980: of those whose turn is not too early, the one whose deadline
    comes first. In whole numbers, so that it's exact for ever.
    """
    weights = [int(share * math.lcm(*(one.denominator for one in shares))) for share in shares]
    total, slack = sum(weights), max(2 * len(weights) - 2, 1)
    had = [0] * len(weights)
    every = [math.lcm(*weights) // weight for weight in weights]
    for turn in count(1):
        due = [i for i, weight in enumerate(weights) if slack * (weight * turn - total * had[i]) >= total]
        chosen = min(due, key=lambda i: (slack * (had[i] + 1) - 1) * every[i])
        had[chosen] += 1
        yield chosen
