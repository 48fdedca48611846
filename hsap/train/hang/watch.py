"""Watch: a thread of every rank that sees whether anybody moves, and ends the run with one message where nobody does.

Nothing is asked of a rank that hangs: where it is lies in shared memory, and the kernel tells whether its process is
there. Between machines records go through the job's store. Whatever else is lost, each rank ends by a limit of its
own: the watch never waits for store, disk or network itself, and where Python's lock is held, faulthandler ends the
process.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hsap.ir.program import Op
from hsap.launched import Place
from hsap.position import Phase, Planning, Position, Wait, Word, decode, moves
from hsap.train import flags
from hsap.train.groups import GuardConfig
from hsap.train.hang import telling
from hsap.train.hang.beats import Beats, meet
from hsap.train.hang.processes import Person, born
from hsap.train.hang.shared import mine, open_at
from hsap.train.hang.sight import Sight
from hsap.train.told import is_echo, say, tell

_CLAIM_S = 3.0
_GRACE_S = 1.0
"""What a rank that has heard the verdict gives its main thread to end by itself."""
_LOCK_S = 30.0
"""So much longer than the watch itself may Python's lock be held before the process is ended."""
_ENDED_S = 3.0
"""How long whoever starts ranks may take to say how one of them ended, before another rank says that it has."""
_TOGETHER = (Phase.JOIN, Phase.AGREE, Phase.JUDGE, Phase.UPDATE, Phase.FIGURES, Phase.SAVED, Phase.END)
"""Phases in which a rank waits for all others, as far as can be seen."""
_CURRENT: list[Watch] = []


def current() -> Watch | None:
    """The watch of this process, None where there is none."""
    return _CURRENT[-1] if _CURRENT else None


class Watch:
    """One rank's watch. Collective when made, before ranks join in groups; ValueError names those that don't come.

    out: the run's folder. `position` is to be kept up to date by whoever trains. ranks_of: the job's ranks of this SP
    group, in which planners are numbered; to be set once that is known. meeting: the job's store.
    """

    def __init__(self, settings: GuardConfig, out: str) -> None:
        self.settings, self.out = settings, out
        place = Place.of(os.environ)
        self.rank, self.num_ranks = place.rank, place.world_size
        self.ranks_of: Sequence[int] = range(self.num_ranks)
        shared, index = mine(self.rank)
        self.position = Position(shared.record(index))
        least = min(limit for limit in (settings.timeout_s, settings.start_timeout_s, 20.0) if limit is not None)
        self.beat_s = min(1.0, least / 20)
        now = time.monotonic_ns()
        self.position.words[Word.BEAT_NS] = self.position.words[Word.MOVED_NS] = now
        patience_s = settings.start_timeout_s
        if patience_s is not None:
            faulthandler.dump_traceback_later(patience_s + _LOCK_S, exit=True)
        # Kept: where rank 0 holds the store, the process group made later shares it.
        self.meeting = meet(self.rank, self.num_ranks, patience_s)
        person = Person.here(shared.path, index)
        self.beats = Beats(self.meeting.clone, self.rank, self.num_ranks, person, self.beat_s, patience_s)
        self._records = [self._record_of(rank) for rank in range(self.num_ranks)]
        self._seen: tuple[int, ...] = ()
        self._ended_since: float | None = None
        self._warned: tuple[int, ...] | None = None
        self._armed_ns = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hsap-watch", daemon=True)

    def __enter__(self) -> Watch:
        self.beats.start(self.position.words.tobytes, [r for r, record in enumerate(self._records) if record is None])
        self._thread.start()
        _CURRENT.append(self)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Leave the others, who go on without this rank."""
        self.position.phase(Phase.LEFT)
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self.beats.close()
        if self in _CURRENT:
            _CURRENT.remove(self)

    def claim(self, text: str) -> bool:
        """Tell the others why this rank ends, so that all do. False: the reason is told already, by another."""
        verdict = self.beats.claim({"by": self.rank, "text": text, "ranks": []}, _CLAIM_S)
        return verdict is None or verdict["by"] == self.rank

    def explain(self, patience_s: float) -> None:
        """Say which rank is gone, having lost the connection to one; returns where no such rank is found in time."""
        end = time.monotonic() + patience_s
        quiet = os.environ.get(flags.STARTED) == "1"  # who started the ranks says how one ended, and where it was
        self.beats.wanted = True
        while time.monotonic() < end:
            if self.beats.verdict is not None:
                self._leave(self.beats.verdict)
            sights = self.sights()
            if not quiet and any(sight.ended() for sight in sights):
                self._speak(sights, "the run ends, because a rank is gone")
            time.sleep(0.02)
        self._speak(self.sights(), "the run ends, because a connection to another rank is closed")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Say which rank is gone as soon as an error tells that one is, before the launcher ends this rank too."""
        try:
            yield
        except RuntimeError as error:
            if is_echo(error) and os.environ.get(flags.STARTED) != "1":
                self.explain(_ENDED_S)
            raise

    def sights(self) -> list[Sight]:
        """All ranks as this one sees them now."""
        now_ns, now = time.monotonic_ns(), time.monotonic()
        own = self.position.words
        own[Word.WAIT], own[Word.PEER] = self._awaits()
        sights = []
        for rank, (person, record) in enumerate(zip(self.beats.people, self._records, strict=True)):
            if record is not None:
                words = tuple(record)
                silent_s, still_s = ((now_ns - words[w]) / 1e9 for w in (Word.BEAT_NS, Word.MOVED_NS))
                sights.append(Sight(rank, person, words, silent_s, still_s, person.state()))
                continue
            heard, since = self.beats.heard.get(rank, (bytes(8 * len(self.position.words)), now))
            words, silent_s = tuple(memoryview(heard).cast("q")), now - since
            still_s = (words[Word.BEAT_NS] - words[Word.MOVED_NS]) / 1e9 + silent_s
            sights.append(Sight(rank, person, words, silent_s, still_s, ""))
        return sights

    def _record_of(self, rank: int) -> memoryview | None:
        """The record of a rank of this machine, as it changes; None on another."""
        person, own = self.beats.people[rank], self.beats.people[self.rank]
        if rank == self.rank:
            return self.position.words
        if person.machine != own.machine or not person.path:
            return None
        shared = open_at(person.path)
        return None if shared is None else shared.record(person.index).cast("q")

    def _run(self) -> None:
        before = time.monotonic_ns()
        while not self._closed.wait(self.beat_s):
            now = time.monotonic_ns()
            # Stopped, or starved of processor time, itself: that time isn't anybody's.
            lost = now - before - round(1e9 * self.beat_s)
            before = now
            self._beat(now, lost if lost > 5e9 * self.beat_s else 0)
            if self.beats.verdict is not None:
                time.sleep(_GRACE_S)
                if not self._closed.is_set():
                    self._leave(self.beats.verdict)
            self._judge()

    def _beat(self, now: int, lost: int) -> None:
        words = self.position.words
        at = moves(words)
        if at != self._seen:
            self._seen, words[Word.MOVED_NS] = at, now
        elif lost:
            words[Word.MOVED_NS] += lost
        words[Word.BEAT_NS], words[Word.CPU_NS] = now, time.process_time_ns()
        words[Word.WAIT], words[Word.PEER] = self._awaits()
        if (limit := self._limit_s()) is not None and now - self._armed_ns > 5e9:
            self._armed_ns = now
            faulthandler.dump_traceback_later(limit + _LOCK_S, exit=True)

    def _limit_s(self) -> float | None:
        """How long nobody may move now."""
        settings = self.settings
        return settings.timeout_s if self.position.words[Word.DONE] else settings.start_timeout_s

    def _awaits(self) -> tuple[Wait, int]:
        """What this rank waits for."""
        words, code, transport = self.position.words, decode(self.position.words[Word.AT]), self.position.transport
        if code is not None:
            awaited = getattr(transport, "waits_for", None) if code.op in (Op.WAIT, Op.ALL_TO_ALL) else None
            return (Wait.NOTHING, -1) if awaited is None else (Wait.RECV if awaited[0] else Wait.SEND, awaited[1])
        phase = Phase(words[Word.PHASE])
        if phase in (Phase.START, Phase.DATA, Phase.EVALUATE) and words[Word.PLANNING] == Planning.AWAITS:
            return Wait.PLAN, self.ranks_of[words[Word.PLANNER]]
        if phase in _TOGETHER:
            return Wait.ALL, -1
        return Wait.NOTHING, -1

    def _judge(self) -> None:
        """Look at the others where this rank waits long, and end the run where nobody moves."""
        limit, still_s = self._limit_s(), (time.monotonic_ns() - self.position.words[Word.MOVED_NS]) / 1e9
        if still_s < 4 * self.beat_s:
            self.beats.wanted, self._warned, self._ended_since = False, None, None
            return
        self.beats.wanted = True
        sights = self.sights()
        if any(sight.ended() for sight in sights):
            self._ended_since = self._ended_since or time.monotonic()
            if time.monotonic() - self._ended_since > _ENDED_S:
                self._speak(sights, "the run ends, because a rank is gone")
        if limit is not None and still_s >= limit and all(s.still_s >= limit for s in sights if not s.left):
            key = "guard.timeout_s" if self.position.words[Word.DONE] else "guard.start_timeout_s"
            self._speak(sights, f"no rank has moved for {still_s:.0f} s ({key}={limit:g}), so the run ends")
        if still_s >= self.settings.report_s and self._warned is None:
            self._warn(sights)

    def _warn(self, sights: list[Sight]) -> None:
        """Say in one line, once for all ranks, that one waits long."""
        self._warned = self._seen
        mine = sights[self.rank]
        waiters = [s.rank for s in sights if s.waits is not None and s.still_s >= 0.9 * self.settings.report_s]
        if waiters and waiters[0] == self.rank:
            # Not by the progress bar, whose lock a thread that hangs may hold; the line it stands in is ended.
            say(f"\nhsap: {telling.moving(mine, sights)}")

    def _speak(self, sights: list[Sight], what: str) -> None:
        """Say why all end, unless another rank has said it; ends this process in either case."""
        # One that is only starved of processor time answers now and then.
        found = telling.blame(sights, max(5 * self.beat_s, 2.0, 0.5 * sights[self.rank].still_s))
        state, lost = telling.stands(sights, found), self._lost_store()
        if lost and found.fault in (telling.Fault.BEHIND, telling.Fault.CIRCLE, telling.Fault.WORKS):
            found = telling.Blame(telling.Fault.STORE, ())
        text = f"{what}. At fault: {'; '.join(filter(None, (lost, state)))}. {self._advice(found)}"
        said = {"by": self.rank, "text": text, "ranks": found.ranks, "silent": found.fault == telling.Fault.SILENT}
        verdict = self.beats.claim(said, _CLAIM_S)
        if verdict is not None:
            if verdict["by"] == self.rank:
                tell(text, self.rank, amid=True)
            self._leave(verdict)
        # Without the store the ranks of one machine can still agree who speaks.
        if (address := _first_here(self.beats.people[0])) is not None:
            tell(text, self.rank, amid=True)
            time.sleep(_CLAIM_S)
            address.close()
        self._leave(said)

    def _lost_store(self) -> str:
        silent_s = self.beats.silent_s()
        if silent_s < max(10 * self.beat_s, 2.0):
            return ""
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        parent = Person("", "", os.getppid(), born(os.getppid()), "", 0)
        holder = "the launcher's agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        if parent.state() in ("T", "t") and holder != "rank 0":
            holder += f", pid {parent.pid}, which is stopped"
        return (
            f"the job's store at {where} hasn't answered for {silent_s:.0f} s: the process that holds it ({holder}) is "
            "stopped or gone, or the network to it is lost"
        )

    def _advice(self, found: telling.Blame) -> str:
        hint = found.fault.value.replace("OUT", self.out)
        if len(found.ranks) == 1:
            hint = hint.replace("rankR", f"rank{found.ranks[0]}")
        return f"What to do: {hint}; if checkpoints were saved, resume=true out={self.out} goes on from the newest"

    def _leave(self, verdict: dict) -> None:
        """End this process, and those of this machine that can't by themselves; with stacks where it is at fault."""
        if self.rank in verdict["ranks"]:
            self._write_stacks()
        if verdict.get("silent"):
            for rank in verdict["ranks"]:
                if rank != self.rank and self._records[rank] is not None:
                    self.beats.people[rank].kill()
        with suppress(OSError):  # a full disk must not keep this process alive
            print(end="", flush=True)  # stdout may be None
        os._exit(1)

    def _write_stacks(self) -> None:
        writing = threading.Thread(target=_stacks, args=(Path(self.out) / f"hang-rank{self.rank}.txt",), daemon=True)
        writing.start()
        writing.join(2.0)  # the disk may be what hangs


def _stacks(path: Path) -> None:
    try:
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        pass  # a full disk, perhaps; the message is told anyway


def _first_here(rank_0: Person) -> socket.socket | None:
    """An address that only the first of the job's processes on this machine can have; None for the others."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0hsap-hang-{rank_0.host}-{rank_0.pid}-{rank_0.born}")
    except OSError:
        name.close()
        return None
    return name
