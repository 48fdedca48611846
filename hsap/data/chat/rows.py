"""Rows: what kind of chat a row of data is, told by its fields, and the conversations in it.

Known shapes, tried in this order; a row with none of them is no chat:

- one question, several answers: `chosen` and `rejected`, or a list `answers`; the question is in `prompt`, in one of
  the shapes below, or is what the answers, given as whole conversations, have in common;
- a tree of messages, see `tree.py`;
- a list of turns: `messages`, or ShareGPT's `conversations`, with `system` and `tools` beside it;
- Alpaca: `instruction`, `input` and `output`, with `history` (earlier questions and answers) and `system`.

Fields of another shape beside these only repeat what the chat says; those that don't are named in its `unread`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hsap.data.chat.conversation import in_order, is_empty, read_tools, read_turn, read_turns, refuse_media, same
from hsap.data.chat.tree import is_tree, read_tree
from hsap.data.document import Conversation, SharedQuestion, Turn
from hsap.data.rejected import Rejected


@dataclass(frozen=True, slots=True)
class ChatFields:
    """Names of the fields that chats are read from, tried in order, and what is taken of a row with several.

    tree: all | best. answers: all | best.
    """

    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected",)
    several: tuple[str, ...] = ("answers", "responses", "completions")
    messages: tuple[str, ...] = ("messages", "conversations", "conversation", "dialog")
    instruction: tuple[str, ...] = ("instruction", "prompt", "question", "query")
    input: tuple[str, ...] = ("input",)
    output: tuple[str, ...] = ("output", "completion", "response", "answer")
    history: tuple[str, ...] = ("history",)
    system: tuple[str, ...] = ("system", "system_prompt")
    tools: tuple[str, ...] = ("tools", "functions")
    tree: str = "all"
    answers: str = "all"

    @classmethod
    def named(cls, names: Mapping[str, str], tree: str = "all", answers: str = "all") -> ChatFields:
        """Use other names for some fields, as in {"messages": "talk"}; ValueError for a field that chats don't have."""
        unknown = [name for name in names if name not in FIELD_NAMES]
        if unknown:
            raise ValueError(
                f"data.chat_fields.{unknown[0]}: no field of chats; they have {', '.join(FIELD_NAMES)}, each to be "
                "given the name that it has in the data"
            )
        return cls(**{name: (value,) for name, value in names.items()}, tree=tree, answers=answers)

    def of(self, row: Mapping[str, Any], name: str) -> Any:
        """Give a field of a row by its name here, an empty one only if no other is there; None where there is none."""
        given = [row[one] for one in getattr(self, name) if row.get(one) is not None]
        return next((value for value in given if not is_empty(value)), given[0] if given else None)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of fields that a row's chat may be in."""
        return tuple(name for field in FIELD_NAMES for name in getattr(self, field))


FIELD_NAMES = tuple(field.name for field in fields(ChatFields) if field.name not in ("tree", "answers"))


Chat = Conversation | SharedQuestion


def chat_of(row: Mapping[str, Any], where: str, fields: ChatFields) -> tuple[Chat, ...]:
    """Read the chats of a row: none if it isn't a chat, one, or as many as a tree has paths.

    where: "path:line". `Rejected`: a chat that can't be trained on, and why.
    """
    read = _read(row, where, fields)
    if read is None:
        return ()
    chats, used = read
    refuse_media(row, where, "the row")
    weight = row.get("loss_weight")
    if weight is not None and not (isinstance(weight, int | float) and weight == 1):
        raise Rejected(where, "a loss weight of a whole row", "give its turns weights")
    unread = _unread(row, chats, fields, used)
    return (replace(chats[0], unread=unread), *chats[1:]) if unread else chats


def _read(row: Mapping[str, Any], where: str, fields: ChatFields) -> tuple[tuple[Chat, ...], tuple[str, ...]] | None:
    """Read the chats of a row and say which fields they are in; None for a row that isn't a chat."""
    answers = _answers(row, fields)
    messages, output = _messages(row, fields), fields.of(row, "output")
    asked = ("messages",) if messages is not None else ("instruction", "input", "history")
    if answers is not None:
        given = ("chosen", "rejected") if fields.of(row, "rejected") is not None else ("several",)
        return (_shared_question(row, answers, where, fields),), (*given, *asked, "system", "tools")
    if is_tree(row, messages):
        paths = read_tree(row, messages, where, best=fields.tree == "best")
        tools = _tools(row, where, fields)
        # A tree without a list of messages is in the row itself or in its prompt.
        within = "messages" if messages is not None else "instruction"
        return tuple(Conversation(path, tools) for path in paths), (within, "tools")
    turns = _question(row, where, fields)
    if turns is None:
        return None
    if messages is None:
        if output is None:
            return None
        turns += _said(output, "assistant", where)
        asked = (*asked, "output")
    return (Conversation(in_order(turns, where), _tools(row, where, fields)),), (*asked, "system", "tools")


def _unread(
    row: Mapping[str, Any], chats: Sequence[Chat], fields: ChatFields, used: tuple[str, ...]
) -> tuple[str, ...]:
    """Name the fields of chats in a row that its chats were not read from and that say something else."""
    told = [one for chat in chats for one in (chat.conversations if isinstance(chat, SharedQuestion) else (chat,))]
    said = {turn.content.strip() for one in told for turn in one.turns}
    unread = []
    for field in FIELD_NAMES:
        value = fields.of(row, field) if field in used else None
        for name in getattr(fields, field):
            other = row.get(name)
            if not is_empty(other) and not (value is not None and same(other, value)) and not _repeats(other, said):
                unread.append(name)
    return tuple(unread)


def _repeats(value: object, said: set[str]) -> bool:
    """Say whether a field has nothing but what turns say."""
    if isinstance(value, str):
        return any(value.strip() in content for content in said)
    if isinstance(value, Mapping):
        return any(_repeats(value.get(name), said) for name in ("content", "value", "text"))
    return isinstance(value, Sequence) and all(_repeats(one, said) for one in value)


def _messages(row: Mapping[str, Any], fields: ChatFields) -> Any:
    """Give the list of turns of a row; an empty one isn't there where a question and an answer are."""
    messages = fields.of(row, "messages")
    if is_empty(messages) and not is_empty(fields.of(row, "instruction")):
        answers = (fields.of(row, name) for name in ("output", "chosen", "several"))
        return None if any(not is_empty(answer) for answer in answers) else messages
    return messages


def _question(row: Mapping[str, Any], where: str, fields: ChatFields) -> tuple[Turn, ...] | None:
    """Read the turns of a row but for an output or answers that stand in a field of their own; None: it has none."""
    messages, instruction = _messages(row, fields), fields.of(row, "instruction")
    if messages is not None:
        turns = read_turns(messages, where)
    elif instruction is None:
        return None
    else:
        turns = _history(fields.of(row, "history"), where) + _said(instruction, "user", where)
        more = fields.of(row, "input")
        if not isinstance(more, str | None):
            raise Rejected(where, "an input that is no text")
        if more and more.strip():
            turns = (*turns[:-1], replace(turns[-1], content="\n".join(filter(None, (turns[-1].content, more)))))
    return _with_system(turns, row, where, fields)


def _with_system(turns: tuple[Turn, ...], row: Mapping[str, Any], where: str, fields: ChatFields) -> tuple[Turn, ...]:
    """Put the row's system prompt, if it has one, before its turns."""
    system = fields.of(row, "system")
    if is_empty(system):
        return turns
    if turns and turns[0].role == "system":
        raise Rejected(where, "two system prompts", "a field of the row, and the first turn")
    return _said(system, "system", where) + turns


def _said(given: object, role: str, where: str) -> tuple[Turn, ...]:
    """Read text, one turn or several; text is said by `role`."""
    if isinstance(given, str):
        return (read_turn({"role": role, "content": given}, where),)
    return (read_turn(given, where),) if isinstance(given, Mapping) else read_turns(given, where)


def _history(given: object, where: str) -> tuple[Turn, ...]:
    if given is None:
        return ()
    pairs = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    turns: list[Turn] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise Rejected(where, "a history that is no list of questions and answers")
        turns += [*_said(pair[0], "user", where), *_said(pair[1], "assistant", where)]
    return tuple(turns)


def _check_repeated(asked: Sequence[Turn], question: Sequence[Turn], where: str) -> None:
    """Reject a prompt with turns that the question, which answers begin with, doesn't have."""
    told = {(turn.role, turn.content.strip()) for turn in question}
    for turn in asked if question else ():
        if turn.content.strip() and (turn.role, turn.content.strip()) not in told:
            raise Rejected(where, "a prompt other than what its answers begin with", f"a turn of the {turn.role}")


def _tools(row: Mapping[str, Any], where: str, fields: ChatFields) -> tuple[dict[str, Any], ...]:
    return read_tools(fields.of(row, "tools"), where)


def _answers(row: Mapping[str, Any], fields: ChatFields) -> list[Any] | None:
    """Give the answers of a row that has several of them, the best first; None for another row."""
    chosen, rejected = fields.of(row, "chosen"), fields.of(row, "rejected")
    if chosen is not None and rejected is not None:
        # Some data sets have several rejected answers; a list of turns is one answer.
        several = isinstance(rejected, Sequence) and not isinstance(rejected, str)
        texts = several and all(isinstance(one, str) for one in rejected)
        return [chosen, *rejected] if texts else [chosen, rejected]
    several = fields.of(row, "several")
    asked = fields.of(row, "instruction") is not None or _messages(row, fields) is not None
    return list(several) if asked and isinstance(several, Sequence) and not isinstance(several, str) else None


def _shared_question(
    row: Mapping[str, Any], given: list[Any], where: str, fields: ChatFields
) -> SharedQuestion | Conversation:
    """Read a question and its answers."""
    answers = [_said(answer, "assistant", where) for answer in given]
    if not answers:
        raise Rejected(where, "a question without answers")
    if all(answer and answer[0].role != "assistant" for answer in answers):
        # Whole conversations: a field with the question only repeats what they begin with.
        shared = 0
        while all(shared < len(answer) - 1 and answer[shared] == answers[0][shared] for answer in answers):
            shared += 1
        # What answers share may end with the first words of all; the question ends with the user or a tool.
        while shared and answers[0][shared - 1].role == "assistant":
            shared -= 1
        question, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        question = _with_system(question, row, where, fields)
        _check_repeated(_question(row, where, fields) or (), question, where)
    else:
        question = _question(row, where, fields) or ()
    if not question:
        raise Rejected(where, "answers without a question")
    tools = _tools(row, where, fields)
    whole = [in_order(question + answer, where) for answer in answers]
    question = tuple(turn for turn in question if turn.role != "system" or turn.content.strip())
    answers = tuple(turns[len(question) :] for turns in whole)
    if any(not answer or answer[0].role != "assistant" for answer in answers):
        raise Rejected(where, "turns are missing or out of order", "an answer doesn't begin with the assistant")
    if len(answers) == 1 or fields.answers == "best":
        return Conversation(question + answers[0], tools)
    return SharedQuestion(question, answers, tools)
