"""Several: sources one after the other, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hsap.data.document import Document
from hsap.data.sources.mixture import Mixture
from hsap.data.sources.source import Source, Tally


class Several:
    """Documents of several sources in their order; a source itself, which can be walked again.

    sources: by name; a document's id is its source's name and its own id. Errors (ValueError): what the sources refuse.
    """

    again = False

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = dict(sources)

    @property
    def parts(self) -> tuple[Source, ...]:
        """Its sources."""
        return tuple(self.sources.values())

    @property
    def tally(self) -> Tally:
        """What the last walk gave and left out, over all sources."""
        return Tally.of(source.tally for source in self.parts)

    def __iter__(self) -> Iterator[Document]:
        for name, source in self.sources.items():
            for document in source:
                yield replace(document, id=f"{name}/{document.id}")


DataSet = Source | Mixture | Several
"""What a data set may be: all of these are walked alike, and count what they leave out."""
