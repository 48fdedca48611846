"""Planners: every published strategy as a small file or folder that only chooses where and when blocks are computed.

A planner is a function of a problem (and options) that returns a `Strategy` for the `topology.inter_sp` ranks of one
intra column; one that plans the whole group may choose another shape for all its ranks. `PLANNERS` is the whole list;
under the name `AUTO` the simulator chooses among them (`hsap.compile`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hsap.ir.check import Refused, instance, one_of, shown
from hsap.ir.problem import Problem
from hsap.ir.schedule import Strategy
from hsap.planners.allgather import allgather
from hsap.planners.basp import basp
from hsap.planners.dcp import dcp
from hsap.planners.distflash import distflash
from hsap.planners.flashcp import flashcp
from hsap.planners.loongtrain import loongtrain
from hsap.planners.magi import magi
from hsap.planners.mesh import mesh
from hsap.planners.nested import nested
from hsap.planners.ring import ring
from hsap.planners.sap import sap
from hsap.planners.te import te
from hsap.planners.usp import usp
from hsap.planners.zigzag import zigzag


def _pairs_of_chunks(documents: int, ranks: int) -> float:
    """Every document in two chunks a rank, and all of them in pairs: 2^18 pairs take seconds."""
    return documents * ranks * (2 * ranks + 1) / (1 << 18)


def _proposals(documents: int, ranks: int) -> float:
    """A search that knows every document on every rank: 100,000 of them take many seconds."""
    return documents * ranks / 100_000


def _little(documents: int, ranks: int) -> float:
    """It never takes long."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Planner:
    """An entry of the table. plan: the function. paper: where it is from. summary: one line for people.

    whole_group: it plans all inter × intra ranks and may give them another shape, `Strategy.topology`.
    slow: it takes so long that `auto` tries it only when it is named. may_relay: it takes the option `relay`, false
    unless given; with relay=True the compiler routes all its rows, and each of them across a node border once.
    usual: it is quick to plan and often quick to run, so that the tuner tries it where no planner is named.
    places_by_heads: where tokens live may depend on the heads; if not, plans for unequal shares of them agree on it.
    effort: of so many documents on so many ranks of a column, above 1 where planning takes seconds or longer; the tuner
    then leaves it out unless it is named.
    """

    plan: Callable[..., Strategy]
    paper: str
    summary: str
    whole_group: bool = False
    slow: bool = False
    may_relay: bool = False
    usual: bool = False
    places_by_heads: bool = True
    effort: Callable[[int, int], float] = _little


PLANNERS: dict[str, Planner] = {
    "ring": Planner(
        ring, "Ring Attention (Liu et al., 2023)", "contiguous shards, KV travels once around", places_by_heads=False
    ),
    "zigzag": Planner(
        zigzag,
        "Striped Attention (2023), TransformerEngine CP",
        "2N chunks a document, KV in a ring",
        places_by_heads=False,
        effort=_pairs_of_chunks,
    ),
    "distflash": Planner(
        distflash,
        "DistFlashAttn / LightSeq (Li et al., 2023)",
        "the pack as one causal triangle, idle ranks help",
        places_by_heads=False,
    ),
    "allgather": Planner(
        allgather,
        "The Llama 3 Herd of Models §3.3.2 (2024)",
        "2N chunks of the pack, needed KV gathered, then compute",
        may_relay=True,
        usual=True,
        places_by_heads=False,
    ),
    "flashcp": Planner(
        flashcp,
        "FlashCP (Wang et al., 2026)",
        "documents whole where balance allows, else in zigzag shards",
        may_relay=True,
        usual=True,
        places_by_heads=False,
    ),
    "magi": Planner(
        magi,
        "MagiAttention (SandAI, 2025)",
        "equal chunks dealt by a min-heap, needed KV multicast",
        may_relay=True,
        usual=True,
        places_by_heads=False,
    ),
    "mesh": Planner(
        mesh,
        "Mesh-Attention (Chen et al., 2025)",
        "2-D tiles of the attention matrix, q and KV travel",
        may_relay=True,
        usual=True,
        effort=_pairs_of_chunks,
    ),
    "nested": Planner(
        nested, "ours", "node first, then rank, then tile; areas and tokens balanced", usual=True, effort=_proposals
    ),
    "sap": Planner(
        sap,
        "HSAP §3.2",
        "each document a balanced triangle, then even over all ranks",
        usual=True,
        places_by_heads=False,
    ),
    "dcp": Planner(
        dcp,
        "DCP (Jiang et al., 2025)",
        "blocks of data and computation as a partitioned hypergraph",
        slow=True,
        may_relay=True,
    ),
    "usp": Planner(usp, "USP (Fang & Zhao, 2024)", "all-to-all over heads × the pack's zigzag ring", whole_group=True),
    "te": Planner(
        te,
        "TransformerEngine a2a+p2p CP",
        "all-to-all over heads × each document's zigzag ring",
        whole_group=True,
        effort=_pairs_of_chunks,
    ),
    "loongtrain": Planner(
        loongtrain,
        "LoongTrain (Gu et al., 2024)",
        "all-to-all over heads × two zigzag rings, one in the node",
        whole_group=True,
        usual=True,
        effort=_pairs_of_chunks,
    ),
    "basp": Planner(
        basp, "BASP (abstract only)", "each sequence of the micro-step on a group of its own", whole_group=True
    ),
}


DEFAULT = "sap"
"""The planner that is meant where none is named."""
RELAY = "relay"
AUTO = "auto"
AUTO_SUMMARY = "whichever of its candidates the simulator says is fastest for the pack (slow ones only where named)"
AUTO_PAPER = "ours: the planners above, compiled and priced for each pack"


def candidates(names: str | None = None) -> tuple[str, ...]:
    """Planners that auto tries, in the order of the table: those of `names` (as in `sap|zigzag`), else all fast ones.

    ValueError: an unknown name, or none at all.
    """
    if names is None:
        return tuple(name for name, planner in PLANNERS.items() if not planner.slow)
    if not isinstance(names, str):
        raise Refused(f"planner {AUTO}: candidates is {shown(names)}; give names, as in sap|zigzag")
    wanted = [name.strip() for name in names.replace(",", "|").split("|")]
    for name in wanted:
        one_of(f"planner {AUTO}: unknown candidate", name, PLANNERS, "planners")
    return tuple(name for name in PLANNERS if name in wanted)


def usual(names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Planners that the tuner tries: those that are named, each once, else the usual ones.

    ValueError: an unknown name.
    """
    if names is None:
        return tuple(name for name, planner in PLANNERS.items() if planner.usual)
    return tuple(dict.fromkeys(one_of("planners: unknown name", name, PLANNERS, "planners") for name in names))


def find(name: str) -> Planner:
    """Look a planner up by name; ValueError lists the known ones."""
    one_of("planner: unknown name", name, (*PLANNERS, AUTO), "planners")
    assert name != AUTO, "auto chooses among planners and is none"
    return PLANNERS[name]


def run(name: str, problem: Problem, options: dict[str, Any]) -> Strategy:
    """Let a planner choose; ValueError where `check_options` finds one."""
    check_options(name, options)
    planner = find(name)
    strategy = planner.plan(problem, **{key: value for key, value in options.items() if key != RELAY})
    assert strategy.topology is None or planner.whole_group, f"planner {name} must say that it plans whole groups"
    return relayed(strategy) if options.get(RELAY) else strategy


def relayed(strategy: Strategy) -> Strategy:
    """Leave all routes to the compiler, which sends a row across each node border once, and on from there."""
    forward, backward = (
        tuple(replace(schedule, transfers=None) for schedule in schedules)
        for schedules in (strategy.forward, strategy.backward)
    )
    return replace(strategy, forward=forward, backward=backward, relay=True)


def options_of(name: str) -> dict[str, object]:
    """Options of a planner, or of auto, with their defaults."""
    if name == AUTO:
        return {"candidates": "|".join(candidates())}
    planner = find(name)
    parameters = inspect.signature(planner.plan).parameters
    own = {p.name: p.default for p in parameters.values() if p.name != "problem"}
    return own | {RELAY: False} if planner.may_relay else own


def listing() -> list[dict[str, Any]]:
    """Say what there is to choose from: name, paper, summary and options of every planner, auto last."""
    told = [(name, planner.paper, planner.summary) for name, planner in PLANNERS.items()]
    return [
        {"name": name, "paper": paper, "summary": summary, "options": options_of(name)}
        for name, paper, summary in [*told, (AUTO, AUTO_PAPER, AUTO_SUMMARY)]
    ]


def check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse, by ValueError, an option that the planner doesn't know and a value that a stored plan can't keep."""
    known = options_of(name)
    for option, value in options.items():
        if option not in known:
            raise Refused(
                f"planner {name}: unknown option {shown(option)}; it takes {', '.join(known) or 'no options'}"
            )
        if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
            raise Refused(
                f"planner {name}: {option} is {shown(value)}; give a word, a finite number, a truth value or None"
            )
    instance(f"planner {name}: {RELAY}", options.get(RELAY, False), bool, "true or false")
    if name == AUTO:
        candidates(options.get("candidates"))
