"""Workers: blocks of documents become tokens in several processes, and come back in the order in which they went.

One process reads the source and the others tokenise, which takes twenty times as long: so every document is read once,
a mixture is mixed once, and what comes out doesn't depend on the number of workers. Blocks and tokens travel through
pipes between our own processes; a worker whose parent is gone reads the end of its pipe, and ends.
"""

from __future__ import annotations

import functools
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from hsap.data.config import DataConfig
from hsap.data.document import Document
from hsap.data.opening import open_template, open_tokenizer
from hsap.data.prefetch import Prefetch
from hsap.data.store import DocumentStore
from hsap.data.tokenise import tokenise_documents
from hsap.ir.check import Refused

_AHEAD = 2
"""Blocks that a worker has at a time: one in work, one waiting."""
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """A block in tokens. read: documents in it; chats: how many are chats.

    left_out: of each that isn't in the store its number in the block, its place and the reason.
    """

    store: DocumentStore
    read: int
    chats: int
    left_out: tuple[tuple[int, str, str], ...]


class BlockTokeniser:
    """Turns blocks of documents into tokens as the settings say."""

    def __init__(self, data: DataConfig) -> None:
        self._tokenizer = open_tokenizer(data)
        self._template = functools.cache(functools.partial(open_template, data, self._tokenizer))

    def __call__(self, block: Sequence[Document]) -> Tokenised:
        left_out: list[tuple[int, str, str]] = []
        taken = 0

        def walk() -> Iterator[Document]:
            nonlocal taken
            for document in block:
                taken += 1
                yield document

        def reject(where: str, reason: str) -> None:
            left_out.append((taken - 1, where, reason))

        store = tokenise_documents(walk(), self._tokenizer, template=self._template, reject=reject)
        return Tokenised(store, len(block), sum(one.chat is not None for one in block), tuple(left_out))


def tokenised(blocks: Iterator[Sequence[Document]], data: DataConfig, workers: int) -> Iterator[Tokenised]:
    """Tokenise blocks in so many processes; one worker is this process itself.

    Errors (ValueError): what tokenising refuses, in the order of the blocks; a worker that the system has ended.
    """
    if workers == 1:
        yield from map(BlockTokeniser(data), blocks)
        return
    with _Workers(data, workers) as crew:
        yield from crew.walk(blocks)


class _Workers:
    def __init__(self, data: DataConfig, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        # Ctrl-C reaches all of a terminal's processes. Workers never see it, from their first moment on: we end them.
        # What the library starts beside the first worker leaves nothing blocked, so it has to be there before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_work, args=(theirs, data), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.terminate()
            process.join(_GRACE_S)

    def walk(self, blocks: Iterator[Sequence[Document]]) -> Iterator[Tokenised]:
        """Give every worker a block and, so that it needn't wait, the next one; a worker answers in order."""
        free = deque([*self._processes] * _AHEAD)
        busy: dict[Connection, deque[int]] = {pipe: deque() for pipe in self._processes}
        done: dict[int, Tokenised | tuple[str, str]] = {}
        sent = given = 0
        most = 2 * len(free)
        block = next(blocks, None)
        while block is not None or given < sent:
            while free and block is not None and sent - given < most:
                pipe = free.popleft()
                self._told(pipe, pipe.send, block)
                busy[pipe].append(sent)
                sent += 1
                block = next(blocks, None)
            awaited: list[Any] = wait([pipe for pipe, numbers in busy.items() if numbers])
            for pipe in awaited:
                done[busy[pipe].popleft()] = self._told(pipe, pipe.recv)
                free.append(pipe)
            while given in done:
                yield _result(done.pop(given))
                given += 1

    def _told(self, pipe: Connection, act: Callable[..., Any], *values: object) -> Any:
        try:
            return act(*values)
        except (EOFError, OSError) as error:
            process = self._processes[pipe]
            process.join(_GRACE_S)
            raise Refused(
                f"a worker ended while it tokenised (exit code {process.exitcode}; -9 mostly is a lack of memory); run "
                f"the same command again, with fewer workers if it is that: it goes on where it was"
            ) from error


def _result(answer: Tokenised | tuple[str, str]) -> Tokenised:
    if isinstance(answer, Tokenised):
        return answer
    kind, told = answer
    raise Refused(told) if kind == "refused" else RuntimeError(f"a worker failed:\n{told}")


def _work(pipe: Connection, data: DataConfig) -> None:
    """Tokenise what comes through a pipe until it ends."""
    tokenise = None
    # Read on a thread of its own: otherwise both ends could wait for the other to read.
    for block in Prefetch(_received(pipe), _AHEAD - 1):
        try:
            tokenise = tokenise or BlockTokeniser(data)
            answer = tokenise(block)
        except ValueError as error:
            answer = ("refused", str(error))
        except Exception:
            answer = ("failed", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return


def _received(pipe: Connection) -> Iterator[Sequence[Document]]:
    with suppress(EOFError, OSError):
        while True:
            yield pipe.recv()
