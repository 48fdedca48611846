"""Sight: one rank as another sees it, and what can be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsap.ir.program import Op
from hsap.position import Code, Phase, Planning, Wait, Word, decode
from hsap.train.hang.processes import GONE, Person

_PHASES = {
    Phase.START: "before the first step",
    Phase.JOIN: "joining the others",
    Phase.DATA: "between two steps",
    Phase.AGREE: "comparing plans",
    Phase.FORWARD: "in the model's forward pass",
    Phase.BACKWARD: "in the model's backward pass",
    Phase.JUDGE: "adding up loss and gradient",
    Phase.UPDATE: "in the optimizer's update, gradients' reduction included",
    Phase.WEIGHTS: "computing new weights from its gradients",
    Phase.FIGURES: "summing the step's figures",
    Phase.EVALUATE: "in evaluation",
    Phase.SAVE: "writing its part of a checkpoint",
    Phase.SAVED: "with its part of a checkpoint written",
    Phase.END: "at the end of the run",
    Phase.LEFT: "through with the run",
}


def where(words: Sequence[int]) -> str:
    """Say where a rank is by its record: instruction or part of the loop, with layer, direction and step.

    What follows "it is": "at #12 attend kv (layer 2, forward, step 41)".
    """
    phase, step = Phase(words[Word.PHASE]), f"step {words[Word.STEP]}"
    if words[Word.MICRO]:
        step += f", micro-batch {words[Word.MICRO]}"
    if (code := decode(words[Word.AT])) is not None:
        direction = "backward" if words[Word.DIRECTION] else "forward"
        evaluating = " of evaluation" if phase == Phase.EVALUATE else ""
        return f"at {code} (layer {words[Word.LAYER]}, {direction}{evaluating}, {step})"
    if phase in (Phase.START, Phase.JOIN, Phase.LEFT):
        return f"{_PHASES[phase]}{_planning(words)}"
    if phase == Phase.DATA:
        return f"{_PHASES[phase]}{_planning(words)} (after step {words[Word.STEP]})"
    if phase in (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE) and words[Word.STREAM]:
        return f"{_PHASES[phase]} (last attention: layer {words[Word.LAYER]}; {step})"
    return f"{_PHASES[phase]} ({step})"


def _planning(words: Sequence[int]) -> str:
    """What the thread that prepares steps does."""
    match Planning(words[Word.PLANNING]):
        case Planning.READS:
            return ", reading data"
        case Planning.PLANS:
            return f", planning micro-batch {words[Word.PLAN]}"
        case Planning.AWAITS:
            return f", waiting for the plan of micro-batch {words[Word.PLAN]}"
    return ""


@dataclass(frozen=True, slots=True)
class Sight:
    """One rank. words: its record. silent_s: since it was last heard of; still_s: since it was last seen to move.

    state: the kernel's letter for the process, or GONE; empty where another machine would have to be asked.
    """

    rank: int
    person: Person
    words: tuple[int, ...]
    silent_s: float
    still_s: float
    state: str

    @property
    def phase(self) -> Phase:
        return Phase(self.words[Word.PHASE])

    @property
    def wait(self) -> Wait:
        """What it waits for. A stopped rank's word is of its last beat, and of no use once it has moved since."""
        wait, code = Wait(self.words[Word.WAIT]), self.code
        waits = code is not None and code.op in (Op.WAIT, Op.ALL_TO_ALL)
        return wait if code is None or (waits and wait in (Wait.RECV, Wait.SEND)) else Wait.NOTHING

    @property
    def peer(self) -> int:
        """The rank it waits for."""
        return self.words[Word.PEER]

    @property
    def code(self) -> Code | None:
        """The instruction of attention's stream that it is at."""
        return decode(self.words[Word.AT])

    @property
    def left(self) -> bool:
        return self.phase == Phase.LEFT

    @property
    def order(self) -> tuple[int, ...]:
        """How far it has come: the same numbers on all ranks at the same place."""
        words = self.words
        return tuple(words[w] for w in (Word.DONE, Word.STEP, Word.MICRO, Word.PHASE, Word.STREAM))

    @property
    def where(self) -> str:
        """See `where`."""
        return where(self.words)

    @property
    def waits(self) -> str | None:
        """What it waits for, in words; None where it works, as far as can be seen."""
        match self.wait:
            case Wait.RECV | Wait.SEND:
                verb, way = ("recv", "from") if self.wait == Wait.RECV else ("send", "to")
                code = self.code
                if code is None:
                    return f"waits to {verb} {way} rank {self.peer}"
                what = f"{'all_to_all ' if code.op == Op.ALL_TO_ALL else ''}{verb} {code.role.name.lower()}"
                return f"waits at #{code.number} {what} {way} rank {self.peer} ({self.where.partition(' (')[2]}"
            case Wait.PLAN:
                plan, step = self.words[Word.PLAN], self.words[Word.STEP]
                return f"waits for the plan of micro-batch {plan} from rank {self.peer} (after step {step})"
            case Wait.ALL:
                return f"waits for the others, {self.where}"
        return None

    @property
    def name(self) -> str:
        """Who it is."""
        return f"rank {self.rank} (pid {self.person.pid} on {self.person.host})"

    def ended(self) -> bool:
        """Whether it has ended without leaving."""
        return self.state == GONE and not self.left
