"""Reader: the text form of a plan, line by line, into columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.check import one_line, shown
from hsap.ir.listing import Listing, read_listing
from hsap.ir.plan import Plan, choice_from_json
from hsap.ir.problem import Problem, Topology, problem_from_json, problem_to_json
from hsap.ir.program import COLUMN_WIDTHS, NONE, Buffers, Programs, Role, Space, typed
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.spelling import HEADER, Words, place_names, whole_share
from hsap.ir.stored import from_json

MAX_CHARACTERS = 1 << 28
MAX_INDEX = 1 << 26
"""Entries of an index that ranges may spell out: a short text could ask for any number of them."""
JSON_LINES = (["problem"], ["planner"], ["options"], ["choice"])
SPAN = r"\[N,N\)"


def parse(text: str) -> Plan | Listing:
    """Read what `Plan.text` printed, or a listing in the paper's bare spelling; `verify` judges either.

    ValueError: the line that can't be read, and what was expected there.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the text has {len(text)} characters, the limit is {MAX_CHARACTERS}; use the stored form")
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    return read_plan(text) if first.startswith(HEADER.split()[0]) else read_listing(text)


def read_plan(text: str) -> Plan:
    """Read the text form of a plan. ValueError: the line that can't be read, and what was expected there."""
    lines = _Lines(text)
    lines.current.word(*HEADER.split())
    lines.done()
    lines.current.word("planner")
    planner = lines.json(str, "a JSON string")
    lines.current.word("options")
    options = lines.json(dict, "a JSON object")
    own = _own_topology(lines)
    choice = _choice(lines)
    problem = _problem(lines)
    topology = own or problem.topology
    if topology.num_ranks != problem.num_ranks:
        raise ValueError(f"topology {own}: the problem has {problem.num_ranks} ranks, so must the shape they run at")
    shards = lines.table("shard", _shard)
    spans = _spans(lines)
    columns = lines.table("column", _row_range)
    ranks = lines.table("rank", _row_range)
    if (len(columns), len(ranks)) != (topology.inter_sp, problem.num_ranks):
        raise lines.current.fail(f"{topology.inter_sp} columns and {problem.num_ranks} ranks before this line")
    slices, programs, charts = [], [], []
    for mask in range(len(problem.masks)):
        lines.current.word("mask")
        lines.current.place(str(mask), "mask")
        lines.done()
        slices.append(_array(lines.table("slice", _slice), 6))
        pair = []
        for direction in DIRECTIONS:
            lines.current.word("direction", direction)
            lines.done()
            chart = _array(lines.table("block", _block), 6)
            index = _index(lines, len(slices[-1]), problem.heads.num_q_heads)
            pair.append((chart, _programs(lines, problem, topology.intra_sp, index)))
        forward, backward = pair
        charts.append((forward[0], backward[0]))
        programs.append((forward[1], backward[1]))
    if lines.current.peek():
        raise lines.current.fail("the end of the text")
    return Plan(
        problem,
        planner,
        options,
        Shards(
            np.concatenate([table for _, table in shards]) if shards else np.zeros((0, 2), np.int64),
            np.cumsum([0] + [len(table) for _, table in shards]),
            np.array([home for home, _ in shards], np.int64),
        ),
        spans,
        _array(columns, 2),
        _array(ranks, 2),
        tuple(slices),
        tuple(programs),
        tuple(charts),
        own,
        choice,
    ).as_read()


def _choice(lines: _Lines) -> dict[str, Any] | None:
    """Read what planner auto found, where it chose the plan."""
    if not lines.starts("choice"):
        return None
    lines.current.word("choice")
    return choice_from_json(lines.json(dict, "a JSON object"))


class _Lines:
    """The lines of a text that say something, taken in order."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.at = 0
        self.current = self._next()

    def _next(self) -> Words:
        while self.at < len(self.lines):
            self.at += 1
            line = self.lines[self.at - 1]
            # A JSON value may contain a semicolon, so these lines have no comments.
            body = line if line.split(maxsplit=1)[:1] in JSON_LINES else line.partition(";")[0]
            if body.strip():
                return Words(self.at, body)
        return Words(self.at, "")

    def starts(self, word: str) -> bool:
        """Whether the current line begins with this word."""
        return self.current.peek() == word

    def done(self) -> None:
        """Insist that the current line is used up, and go to the next."""
        self.current.end()
        self.current = self._next()

    def table(self, word: str, read: Callable[[Words, int], Any]) -> list[Any]:
        """Read the lines that begin with `word`; `read` gets the line and how many came before."""
        out: list[Any] = []
        while self.starts(word):
            self.current.word(word)
            out.append(read(self.current, len(out)))
            self.done()
        return out

    def json(self, kind: type = object, expected: str = "a JSON value") -> Any:
        """Read what is left of the current line as one JSON value of that kind, and go to the next line."""
        line = self.current
        try:
            value = from_json(self.lines[self.at - 1].split(maxsplit=line.at)[line.at])
        except (ValueError, IndexError, RecursionError):
            raise line.fail(expected) from None
        if not isinstance(value, kind):
            raise line.fail(expected)
        self.current = self._next()
        return value


def _own_topology(lines: _Lines) -> Topology | None:
    """Read the shape that the ranks run at, which is there only where it isn't the problem's."""
    if not lines.starts("topology"):
        return None
    line = lines.current
    line.word("topology")
    inter_sp, intra_sp = line.integers("NxN", "a shape, as in 4x2", 32)
    try:
        topology = Topology(inter_sp, intra_sp)
    except ValueError as error:
        raise ValueError(f"line {line.number}: {error}") from None
    lines.done()
    return topology


def _problem(lines: _Lines) -> Problem:
    """Read the lines of the problem. A topology of more ranks than there are lines is refused before it is made."""
    data: dict[str, Any] = {}
    first = lines.current
    while lines.starts("problem"):
        lines.current.word("problem")
        name = lines.current.take("[a-z_]+", "a part of the problem")[0]
        data[name] = lines.json()
    try:
        if Topology.parse(data["topology"]).num_ranks > len(lines.lines):
            raise ValueError(
                f"topology {shown(data['topology'])} has more ranks than the text has lines; it is cut short"
            )
        problem = problem_from_json(data)
        same = problem_to_json(problem) == data
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"line {first.number}: the problem lacks or mistypes {one_line(error)}") from None
    except ValueError as error:
        raise ValueError(f"line {first.number}: {error}") from None
    if not same:
        known = ", ".join(problem_to_json(problem))
        raise ValueError(f"line {first.number}: the problem has unknown parts or values; its parts are {known}")
    return problem


def _array(rows: list[Any], width: int) -> np.ndarray:
    return np.array(rows, np.int64).reshape(len(rows), width)


def _shard(line: Words, count: int) -> tuple[int, np.ndarray]:
    line.place(str(count), "shard")
    line.word("home")
    return line.integer("a rank"), _array(_span_list(line), 2)


def _span_list(line: Words) -> list[list[int]]:
    out = []
    while line.peek():
        out.append(line.integers(SPAN, "a span, as in [0,100)"))
    return out


def _spans(lines: _Lines) -> np.ndarray:
    table: list[list[int]] = []
    while lines.starts("spans"):
        lines.current.word("spans")
        lines.current.place(str(len(table)), "entry of the span table")
        table += _span_list(lines.current)
        lines.done()
    return _array(table, 2)


def _row_range(line: Words, count: int) -> list[int]:
    line.place(str(count), "of its kind")
    return _pair(line, "rows", 64)


def _pair(line: Words, word: str, bits: int = 32) -> list[int]:
    line.word(word)
    return line.integers("N:N", "a range, as in 3:4", bits)


def _slice(line: Words, count: int) -> list[int]:
    line.place(str(count), "slice")
    out: list[int] = []
    for word, pattern in (("q", SPAN), ("k", SPAN), ("lo", "N"), ("hi", "N")):
        line.word(word)
        out += line.integers(pattern, f"the {word} of a slice")
    return out


def _block(line: Words, count: int) -> list[int]:
    out = []
    for word in ("q", "kv", "group", "rank", "stage", "area"):
        line.word(word)
        out.append(line.integer())
    return out


def _index(lines: _Lines, num_slices: int, num_heads: int) -> array[int]:
    """Read the index of what is attended: as many of the slices as query heads could ask for at most."""
    index = array("i")
    most = min(num_slices * num_heads, MAX_INDEX)
    while lines.starts("index"):
        line = lines.current
        line.word("index")
        line.place(str(len(index)), "entry of the index")
        while line.peek():
            single = ":" not in line.peek()
            first, *stop = line.integers("N" if single else "N:N", "a slice or a range of slices, as in 3:7", 32)
            run = range(first, *stop) if stop else range(first, first + 1)
            # A number that is none of the slices is the verifier's to judge, as in other columns.
            if not 0 < len(run) <= min(num_slices, most - len(index)):
                line.at -= 1
                raise line.fail(f"one slice or some of {num_slices}, and {most} entries of the index at most")
            index.extend(run)
        lines.done()
    return index


def _programs(lines: _Lines, problem: Problem, intra_sp: int, index: array[int]) -> Programs:
    """Read the streams of all ranks for one mask and direction."""
    buffers: list[list[int]] = []
    code: list[list[int]] = []
    copies: list[tuple[Words, int, int, tuple[str, ...]]] = []
    buffer_offsets, offsets = [0], [0]
    for rank in range(problem.num_ranks):
        lines.current.word("stream", "rank")
        lines.current.place(str(rank), "rank")
        lines.done()
        while lines.current.peek().startswith("b"):
            lines.current.place(f"b{len(buffers) - buffer_offsets[-1]}", "buffer")
            buffers.append(_buffer(lines.current))
            lines.done()
        share, stage = whole_share(problem.heads, intra_sp, rank), None
        while lines.current.peek().startswith("#") or lines.starts("stage"):
            line = lines.current
            if line.skip("stage"):
                stage = line.integer("a stage", 32)
            elif stage is None:
                raise line.fail("a line with the stage, as in 'stage 0', before the first instruction")
            else:
                line.place(f"#{len(code) - offsets[-1]}", "instruction")
                row, names = _instruction(line, buffer_offsets[-1], share)
                if names:
                    copies.append((line, rank, len(code), names))
                code.append([*row, stage])
            lines.done()
        buffer_offsets.append(len(buffers))
        offsets.append(len(code))
    programs = _columns(buffer_offsets, buffers, offsets, code, index)
    for line, rank, at, names in copies:
        source, target = place_names(programs.buffers, rank, programs.buf[at, :2].tolist())
        if names != (source, target):
            raise ValueError(
                f"line {line.number}: this copy goes from ${source} to ${target}, not ${' to $'.join(names)}"
            )
    return programs


def _buffer(line: Words) -> list[int]:
    role = Role.NONE if line.skip("scratch") else line.role()
    space = Space[line.take("input|output|kept|arena", "a space: input, output, kept or arena")[0].upper()]
    acc = line.skip("acc")
    rows = _pair(line, "rows") if line.peek() == "rows" else [NONE, NONE]
    heads = _heads(line) if line.peek() == "heads" else [0] * 4
    line.word("bytes")
    num_bytes = line.integer()
    offset = line.integer() if line.skip("at") else NONE
    return [role, space, acc, *rows, *heads, num_bytes, offset]


def _heads(line: Words) -> list[int]:
    line.word("heads")
    q = line.integers("qN:N", "query heads, as in q0:8", 16)
    return q + line.integers("kvN:N", "KV heads, as in kv0:2", 16)


def _instruction(line: Words, first_buffer: int, share: list[int]) -> tuple[list[int], tuple[str, ...]]:
    """Read an instruction behind its number: its columns but the stage, and the names that a copy gave its buffers."""
    op, role, peer, names = line.operation()
    if line.peek().startswith("%"):
        peer = line.integers("%N", "a peer, as in %3", 32)[0]
    round_ = line.integer("a round", 32) if line.skip("round") else NONE
    buf: list[int] = []
    while line.peek() == "-" or line.peek().startswith("b"):
        buf.append(NONE if line.skip("-") else line.integers("bN", "a buffer, as in b3", 31)[0] + first_buffer)
        line.skip("->")
    if len(buf) > COLUMN_WIDTHS["buf"]:
        raise ValueError(f"line {line.number}: {len(buf)} buffers; an instruction has at most {COLUMN_WIDTHS['buf']}")
    rows = _pair(line, "rows") if line.peek() == "rows" else [NONE, NONE]
    slices = _pair(line, "slices") if line.peek() == "slices" else [NONE, NONE]
    heads = _heads(line) if line.peek() == "heads" else share
    padding = [NONE] * (COLUMN_WIDTHS["buf"] - len(buf))
    return [op, role, peer, round_, *buf, *padding, *rows, *slices, *heads], names


def _columns(
    buffer_offsets: list[int], buffers: list[Any], offsets: list[int], code: list[Any], index: array[int]
) -> Programs:
    b, c = _array(buffers, 11), _array(code, 18)
    table = Buffers(np.array(buffer_offsets), b[:, 0], b[:, 1], b[:, 2], b[:, 3:5], b[:, 5:9], b[:, 9], b[:, 10])
    columns = (c[:, 0], c[:, 1], c[:, 2], c[:, 3], c[:, 4:9], c[:, 9:11], c[:, 11:13], c[:, 13:17], c[:, 17])
    return typed(Programs(np.array(offsets), *columns, np.array(index, np.int32), typed(table)))
