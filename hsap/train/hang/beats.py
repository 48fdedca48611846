"""Beats: what ranks tell one another of their positions through the job's store, on a thread that may get stuck.

Every rank sets its own record each beat and looks whether one has said why the run ends. Only while a rank waits long
does it fetch the others'. The store's process may be stopped or cut off: then the thread waits, and others go by when
it last had an answer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hsap.train.hang.processes import Person

_PREFIX = "hsap/hang"
_VERDICT = f"{_PREFIX}/verdict"


def meet(rank: int, num_ranks: int, patience_s: float | None) -> Any:
    """Give the store at which the job's ranks meet, as the launcher's variables say; rank 0 makes it if nobody else.

    torchrun's agent keeps its store when it starts ranks again: what the ranks before them have left is out of sight.
    ValueError: nobody can be met there, as where the port is another program's.
    """
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, num_ranks, timeout=_limit(patience_s))))
    except dist.DistNetworkError as error:
        at = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ValueError(
            f"rank {rank} can't meet the others at {at} ({str(error).splitlines()[0]}); if another run has that port, "
            "choose one of your own (--master_port of deepspeed, --master-port of torchrun, or MASTER_PORT)"
        ) from error
    return dist.PrefixStore(f"hsap/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _limit(patience_s: float | None) -> timedelta:
    return timedelta(days=30) if patience_s is None else timedelta(seconds=patience_s)


class Beats:
    """One rank's way to the others. connect: gives a connection of its own to the store. Collective when made.

    wanted: whether the others' records are fetched. heard: the last record of every rank, and when it last changed.
    verdict: what one rank has said about why all end.
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        num_ranks: int,
        person: Person,
        beat_s: float,
        patience_s: float | None,
    ) -> None:
        self.rank, self.num_ranks, self.beat_s = rank, num_ranks, beat_s
        # One for the beats, one for what is said in the end, when the first may be stuck.
        self._store, self._last = connect(), connect()
        self._store.set(f"{_PREFIX}/person/{rank}", json.dumps(person.to_json()))
        keys = [f"{_PREFIX}/person/{r}" for r in range(num_ranks)]
        try:
            self._store.wait(keys, _limit(patience_s))
        except dist.DistStoreError:
            missing = ", ".join(str(r) for r, key in enumerate(keys) if not self._store.check([key]))
            raise ValueError(
                f"rank {rank} waited {patience_s:g} s for the others (guard.start_timeout_s), and these haven't come: "
                f"{missing}; see what they wait for, or whether they, or their hosts, are there"
            ) from None
        self.people = tuple(Person(**json.loads(text)) for text in self._fetch(keys))
        self.wanted = False
        self.heard: dict[int, tuple[bytes, float]] = {}
        self.verdict: dict | None = None
        self.answered_s = time.monotonic()
        self._closed = threading.Event()
        self._record = b""
        self._thread = threading.Thread(target=self._run, name="hsap-beats", daemon=True)

    def start(self, record: Callable[[], bytes], remote: Sequence[int]) -> None:
        """Begin. record: gives this rank's; remote: ranks whose records lie in no memory that is seen from here."""
        self._own, self._remote = record, tuple(remote)
        self._thread.start()

    def close(self) -> None:
        """Tell the last record and end; not waiting long for a store that doesn't answer."""
        self._closed.set()
        self._thread.join(2.0)

    def claim(self, said: dict, patience_s: float) -> dict | None:
        """Say why all end, unless one has said it: gives what stands; None where the store doesn't answer in time."""
        answer: list[dict] = []

        def ask() -> None:
            with suppress(RuntimeError, ValueError):  # where the store is gone, that there is no answer says it
                answer.append(json.loads(self._last.compare_set(_VERDICT, "", json.dumps(said))))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(patience_s)
        return answer[0] if answer else None

    def silent_s(self) -> float:
        """How long the store hasn't answered."""
        return time.monotonic() - self.answered_s

    def _run(self) -> None:
        try:
            while True:
                closing = self._closed.wait(self.beat_s)
                self._beat()
                if closing:
                    return
        except RuntimeError:
            return  # the store's process has ended, which the watch sees by `silent_s`

    def _beat(self) -> None:
        if self._remote:
            self._store.set(f"{_PREFIX}/at/{self.rank}", self._own().hex())
        if self._store.check([_VERDICT]):
            self.verdict = json.loads(self._store.get(_VERDICT))
        if self.wanted and self._remote:
            keys = [f"{_PREFIX}/at/{rank}" for rank in self._remote]
            if self._store.check(keys):
                self._hear(self._fetch(keys))
        self.answered_s = time.monotonic()

    def _hear(self, texts: Sequence[bytes]) -> None:
        now = time.monotonic()
        for rank, text in zip(self._remote, texts, strict=True):
            record = bytes.fromhex(text.decode())
            before = self.heard.get(rank)
            if before is None or before[0] != record:
                self.heard[rank] = record, now

    def _fetch(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(list(keys))
