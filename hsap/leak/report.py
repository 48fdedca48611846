"""Report: what a leak check has found, in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from typing import Any

from hsap.ir.check import Refused, fields, instance, one_of, shown, texts, whole
from hsap.ir.schedule import DIRECTIONS

MAX_NAMED, MAX_TOLD = 5, 3
"""Documents that a leak names, and leaks that a paragraph does."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Rows that changed and shouldn't have.

    told: what was changed. direction: forward (hidden states) or backward (gradients). where: the first layer at which
    they differ, in that direction; module: which of its modules. documents: their names, the most changed first;
    num_documents: of how many. size: the largest difference over the root mean square of all rows; bound: what it may
    be (0: the same bits).
    """

    told: str
    direction: str
    where: str
    module: str
    documents: tuple[str, ...]
    num_documents: int
    size: float
    bound: float

    def __str__(self) -> str:
        more = self.num_documents - len(self.documents)
        named = ", ".join(self.documents) + (f" and {more} more" if more else "")
        what, first = (
            ("hidden states", "first") if self.direction == "forward" else ("gradients", "going backward first")
        )
        inside = f" (seen at {self.module})" if self.module != self.where else ""
        bound = f"they may by {self.bound:.1g}" if self.bound else "they must keep every bit"
        return (
            f"{self.told} changes the {what} of {named}, {first} in {self.where}{inside}, by {self.size:.1e} of a "
            f"row's size, where {bound}"
        )

    @classmethod
    def from_json(cls, value: Any) -> Leak:
        """Read one of a report's leaks; ValueError."""
        value = fields("a leak", value, [field.name for field in fields_of(cls)])
        told, where, module = texts("a leak's words", [value[name] for name in ("told", "where", "module")])
        direction = one_of("a leak's direction is", value["direction"], DIRECTIONS)
        documents = tuple(texts("a leak's documents", value["documents"]))
        num_documents = whole("a leak's num_documents", value["num_documents"], len(documents))
        size, bound = (_size(f"a leak's {name}", value[name]) for name in ("size", "bound"))
        return cls(told, direction, where, module, documents, num_documents, size, bound)


@dataclass(frozen=True, slots=True)
class LeakReport:
    """What a leak check did and found; leaks: empty where there are none. told: what was compared, in one line.

    undecided: why nothing can be told of this batch and model; empty where something can.
    """

    told: str
    leaks: tuple[Leak, ...] = ()
    undecided: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing leaks, as far as could be told."""
        return not self.leaks and not self.undecided

    def __str__(self) -> str:
        return f"leak check: {self.told}" if self.ok else self.paragraph()

    def paragraph(self) -> str:
        """Everything found, in one paragraph."""
        if self.undecided:
            return f"leak check: {self.undecided}"
        more = len(self.leaks) - MAX_TOLD
        found = "; ".join(map(str, self.leaks[:MAX_TOLD])) + (f"; so do {more} more changes" if more > 0 else "")
        return (
            f"leak check: {found}. Rows reach others that the masks keep from them: give "
            "attention the documents' borders (masks, positions that begin anew in each), and let layers mix tokens by "
            "attention alone"
        )

    def check(self) -> None:
        """Refuse a model that leaks, or of which that can't be told: ValueError with the paragraph."""
        if not self.ok:
            raise ValueError(self.paragraph())

    def to_json(self) -> dict[str, Any]:
        leaks = [asdict(leak) for leak in self.leaks]
        return {"ok": self.ok, "told": self.told, "leaks": leaks, "undecided": self.undecided}

    @classmethod
    def from_json(cls, value: Any) -> LeakReport:
        """Read what `to_json` gave, through JSON; ValueError for anything else."""
        value = fields("a leak report", value, ("ok", "told", "leaks", "undecided"))
        leaks = tuple(map(Leak.from_json, instance("a leak report's leaks", value["leaks"], list, "a list")))
        told, undecided = texts("a leak report's words", [value["told"], value["undecided"]])
        report = cls(told, leaks, undecided)
        if value["ok"] is not report.ok:
            raise Refused(f"a leak report's ok is {shown(value['ok'])}, and it has {len(leaks)} leaks")
        return report


def _size(name: str, value: Any) -> float:
    """Read how far rows are apart, which may be infinitely; ValueError."""
    if isinstance(value, float) and value >= 0:
        return value
    raise Refused(f"{name} is {shown(value)}; it must be a number from 0, with a point")
