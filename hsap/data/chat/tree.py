"""Tree: messages of which each may have several replies (OpenAssistant's form), and the conversations in it.

A tree is nested, a message holding its `replies` (or `children`), or a list of messages that name their parent. Every
way from the root to an assistant's message without replies is a conversation; a way that ends with a user's message
ends with the last answer before it. Taken are either all ways, or the best: at every message the reply of the lowest
rank (0 is the best), or the first where there are no ranks.

Ways share their beginnings. Of all ways the first trains an answer and the later ones have it as context only (weight
0), so that an answer with many ways through it isn't trained as many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hsap.data.chat.conversation import in_order, read_turn
from hsap.data.document import Turn
from hsap.data.rejected import Rejected

_REPLIES = ("replies", "children")
_ID_FIELDS = ("message_id", "id")


def is_tree(row: Mapping[str, Any], messages: Any) -> bool:
    """Whether a row is a tree: a message with replies, a prompt that is one, or messages that name their parent."""
    if _root(row) is not None or ("parent_id" in row and "role" in row):
        return True
    several = isinstance(messages, Sequence) and not isinstance(messages, str)
    return several and any(isinstance(turn, Mapping) and "parent_id" in turn for turn in messages)


def read_tree(row: Mapping[str, Any], messages: Any, where: str, best: bool) -> tuple[tuple[Turn, ...], ...]:
    """Give the turns of every conversation of a tree, or of the best one; `Rejected` where one isn't in order."""
    root = _root(row)
    if root is None and (isinstance(messages, str) or not isinstance(messages, Sequence)):
        raise Rejected(where, "a message of a tree without the tree", "give trees with their replies, one a row")
    roots = [root] if root is not None else _linked(messages, where)
    ways = [way for one in roots for way in _ways(one, best, where)]
    if best:
        ways = ways[:1]
    told: set[int] = set()
    paths = []
    for way in ways:
        turns = [read_turn(message, where, i) for i, message in enumerate(way, 1)]
        while turns and turns[-1].role != "assistant":
            turns.pop()
        if turns and id(way[len(turns) - 1]) not in told:
            known = [replace(turn, weight=0.0) if id(message) in told else turn for message, turn in zip(way, turns)]
            paths.append(in_order(known, where))
            told.update(map(id, way[: len(turns)]))
    if not paths:
        raise Rejected(where, "a tree without an answer")
    return tuple(paths)


def _root(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Give the first message of a nested tree."""
    for one in (row, row.get("prompt")):
        if isinstance(one, Mapping) and any(isinstance(one.get(name), list | tuple) for name in _REPLIES):
            return one
    return None


def _replies(message: Mapping[str, Any]) -> list[Any]:
    return next((list(message[name]) for name in _REPLIES if isinstance(message.get(name), list | tuple)), [])


def _ways(root: Mapping[str, Any], best: bool, where: str) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """Walk the ways from a message to the ends, depth first, without recursion: trees may be deep."""
    open_ways: list[tuple[Mapping[str, Any], ...]] = [(root,)]
    while open_ways:
        way = open_ways.pop()
        replies = _replies(way[-1])
        if not all(isinstance(reply, Mapping) for reply in replies):
            raise Rejected(where, "a turn is no object", "a reply")
        if not replies:
            yield way
        if not all(isinstance(reply.get("rank"), int | float | None) for reply in replies):
            raise Rejected(where, "a rank that is no number")
        # The best reply first; `sorted` keeps the order of those without a rank, behind the others.
        ordered = sorted(replies, key=lambda reply: (reply.get("rank") is None, reply.get("rank") or 0))
        open_ways += [(*way, reply) for reply in (ordered[:1] if best else reversed(ordered))]


def _linked(messages: Sequence[Any], where: str) -> list[Mapping[str, Any]]:
    """Nest messages that name their parent; gives those without one."""
    nodes: dict[str | int, dict[str, Any]] = {}
    roots: list[Mapping[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise Rejected(where, "a turn is no object", "a message of a tree")
        if _replies(message):
            raise Rejected(where, "messages of a tree that name their parent and have replies, too")
        name = next((message[field] for field in _ID_FIELDS if message.get(field) is not None), None)
        if not isinstance(name, str | int) or name in nodes:
            raise Rejected(where, "messages of a tree without ids of their own")
        nodes[name] = {**message, "replies": []}
    for node in nodes.values():
        parent = node.get("parent_id")
        if parent is None:
            roots.append(node)
        elif isinstance(parent, str | int) and parent in nodes:
            nodes[parent]["replies"].append(node)
        else:
            raise Rejected(where, "a message of a tree whose parent is missing", str(parent))
    if not roots:
        raise Rejected(where, "a tree without a first message")
    reached, seen = list(roots), 0
    while seen < len(reached):
        reached += reached[seen]["replies"]
        seen += 1
    if seen < len(nodes):
        raise Rejected(where, "messages of a tree that are their own ancestors")
    return roots
