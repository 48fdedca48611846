"""Who is told to be at fault where nobody moves, from records alone; and what a stream notes of itself."""

import os
import signal
import subprocess
import sys

import pytest

from hsap.ir.program import Op, Role
from hsap.position import NUM_WORDS, Phase, Planning, Position, Wait, Word, decode, encode, moves
from hsap.train.hang import telling
from hsap.train.hang.processes import GONE, Person, born, ending
from hsap.train.hang.shared import make, open_at
from hsap.train.hang.sight import Sight, where
from hsap.train.hang.telling import Fault


def sight(rank, at=None, state="S", silent_s=0.1, still_s=61.0, **words):
    record = [0] * NUM_WORDS
    settings = {"PHASE": Phase.FORWARD, "STEP": 41, "LAYER": 2, "DONE": 40, "STREAM": 9, "PEER": -1} | words
    for name, value in settings.items():
        record[Word[name]] = int(value)
    if at is not None:
        record[Word.AT] = encode(*at)
    return Sight(rank, Person("node-a", "m", 100 + rank, 7, "", 0), tuple(record), silent_s, still_s, state)


def told(*sights):
    found = telling.blame(sights, 3.0)
    return found, telling.stands(sights, found)


ATTENDS = (12, Op.ATTEND, Role.KV)
WAITS = (17, Op.WAIT, Role.KV)


def test_a_rank_that_works_is_named_before_those_that_wait_for_it():
    waiter = sight(3, WAITS, WAIT=Wait.RECV, PEER=5)
    found, text = told(waiter, sight(4, WAITS, WAIT=Wait.RECV, PEER=3), sight(5, ATTENDS, still_s=41))
    assert found == telling.Blame(Fault.WORKS, (5,))
    assert text.startswith("rank 5 (pid 105 on node-a) is at #12 attend kv (layer 2, forward, step 41) for 41 s; ")
    assert "rank 3 waits at #17 recv kv from rank 5 (layer 2, forward, step 41) for 61 s" in text


@pytest.mark.parametrize(
    ("state", "means"),
    [("T", "is stopped (kill -CONT 101"), ("", "its host or the network"), ("D", "waits for a disk")],
)
def test_a_rank_that_does_not_answer_is_named_before_one_that_works(state, means):
    found, text = told(sight(0, ATTENDS), sight(1, ATTENDS, state=state, silent_s=44))
    assert found == telling.Blame(Fault.SILENT, (1,))
    assert text.index("rank 1") < text.index("rank 0") and means in text and "for 44 s" in text


def test_a_rank_that_has_ended_is_named_before_all_others_and_one_that_left_never():
    left = sight(2, state=GONE, PHASE=Phase.LEFT, silent_s=99)
    found, text = told(sight(0, WAITS, silent_s=50), sight(1, ATTENDS, state=GONE, silent_s=9), left)
    assert found == telling.Blame(Fault.ENDED, (1,))
    assert "has ended without a word, last seen at #12 attend kv" in text and "rank 2" not in text


def test_of_ranks_that_all_wait_the_hindmost_is_at_fault():
    agreeing = {"WAIT": Wait.ALL, "PHASE": Phase.AGREE, "STEP": 42}
    found, text = told(sight(0, **agreeing), sight(1, **agreeing), sight(2, WAIT=Wait.ALL, PHASE=Phase.FIGURES))
    assert found == telling.Blame(Fault.BEHIND, (2,))
    assert "each of ranks 0 and 1 waits for the others, comparing plans (step 42)" in text


def test_a_stopped_rank_is_told_as_stopped_and_not_by_what_it_waited_for_before():
    waiter = sight(0, WAITS, WAIT=Wait.SEND, PEER=1)
    stopped = sight(1, (8, Op.ATTEND, Role.NONE), state="T", silent_s=4, WAIT=Wait.ALL)
    assert stopped.waits is None and sight(1, ATTENDS, WAIT=Wait.RECV, PEER=0).waits is None
    line = telling.moving(waiter, [waiter, stopped])
    assert "rank 1 (pid 101 on node-a) is stopped (kill -CONT 101" in line and "waits for the others" not in line
    assert line.endswith("last seen at #8 attend (layer 2, forward, step 41)")


def test_ranks_that_wait_for_each_other_have_lost_what_they_sent():
    one, two = sight(0, WAITS, WAIT=Wait.RECV, PEER=1), sight(1, WAITS, WAIT=Wait.SEND, PEER=0)
    found, text = told(one, two, sight(2, WAIT=Wait.ALL, PHASE=Phase.UPDATE))
    assert found == telling.Blame(Fault.CIRCLE, (0, 1))
    assert text.startswith("all wait for one another") and "recv kv from rank 1" in text and "send kv to rank 0" in text


def test_of_a_thousand_ranks_all_at_fault_are_named_and_the_rest_are_counted():
    """One of the lines that are cut off is of hundreds of ranks, and there are more lines at fault than are shown."""
    silent = [sight(rank, ATTENDS, state="T", silent_s=20 + rank) for rank in range(0, 80, 10)]
    told_of = {s.rank for s in silent}
    some = {rank: sight(rank, WAITS, WAIT=Wait.RECV, PEER=rank - 1) for rank in (101, 103, 205, 207, 309, 411)}
    many = [
        some.get(rank) or sight(rank, WAIT=Wait.ALL, PHASE=Phase.AGREE if rank < 500 else Phase.UPDATE)
        for rank in range(1000)
        if rank not in told_of
    ]
    found, text = told(*many, *silent)
    assert found == telling.Blame(Fault.SILENT, tuple(sorted(told_of)))
    *lines, last = text.split("; ")
    assert [line.split(" (")[0] for line in lines[:8]] == [f"rank {rank}" for rank in sorted(told_of)]
    first, *rest = lines[8:]
    assert first.startswith("each of ranks 1 to 9, 11 to 19, ") and "71 to 100, 102, 104 to 204, 206, " in first
    assert "310 to 410 and 412 to 499 waits for the others, comparing plans" in first
    assert [line.split()[1] for line in rest] == ["101", "103", "205", "207", "309"]
    # Rank 411, and all from 500 on.
    assert last == "and 501 more ranks" and len(text) < 3000


def test_of_a_thousand_ranks_in_a_circle_those_that_make_it_come_first():
    ring = [sight(rank, WAITS, WAIT=Wait.RECV, PEER=1009 - rank) for rank in range(500, 510)]
    found, text = told(*(sight(rank, WAIT=Wait.ALL, PHASE=Phase.AGREE) for rank in range(500)), *ring)
    assert found == telling.Blame(Fault.CIRCLE, tuple(range(500, 510)))
    _, *lines, last = text.split("; ")
    assert [line.split()[1] for line in lines] == [str(rank) for rank in range(500, 506)]
    assert last == "and 504 more ranks"
    assert told(*(sight(rank, WAIT=Wait.ALL, PHASE=Phase.AGREE, still_s=rank) for rank in range(7)))[1].endswith(
        "for 5 s; and 1 more rank"
    )


def test_where_a_rank_is_reads_as_people_say_it():
    def at(**words):
        return where(sight(0, **words).words)

    assert at(at=ATTENDS, DIRECTION=1, MICRO=3) == "at #12 attend kv (layer 2, backward, step 41, micro-batch 3)"
    assert at(PHASE=Phase.DATA, PLANNING=Planning.PLANS, PLAN=84) == (
        "between two steps, planning micro-batch 84 (after step 41)"
    )
    assert at(PHASE=Phase.SAVE) == "writing its part of a checkpoint (step 41)"
    assert {str(phase) for phase in Phase} and all(at(PHASE=phase) for phase in Phase)


@pytest.mark.parametrize("op", [None, *Op])
def test_an_instruction_is_a_number_that_says_it(op):
    for index in (0, 70_000):
        for role in Role:
            assert decode(encode(index, op, role)) == (index, op, role) and encode(index, op, role) > 0
    assert decode(0) is None


def test_every_note_of_the_loop_is_seen_as_a_move():
    position = Position()
    notes = (
        lambda: position.enter(0, 1, None),
        lambda: position.words.__setitem__(Word.AT, 5),
        position.leave,
        lambda: position.phase(Phase.AGREE, 1),
        lambda: position.micro(1),
        position.tick,
        position.done,
        lambda: position.planning(Planning.READS),
    )
    for note in notes:
        before = moves(position.words)
        note()
        assert moves(position.words) != before


def test_another_process_reads_the_record_of_one_that_is_stopped_and_nothing_stays():
    code = (
        "import sys, time; from hsap.train.hang.shared import make; from hsap.position import Phase, Position\n"
        "shared = make(2); Position(shared.record(1)).phase(Phase.FORWARD, 41)\n"
        "print(shared.path, flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        path = other.stdout.readline().strip()
        person = Person.here(path, 1)
        theirs = Person(person.host, person.machine, other.pid, born(other.pid), path, 1)
        other.send_signal(signal.SIGSTOP)
        record = open_at(path).record(1).cast("q")
        assert (record[Word.PHASE], record[Word.STEP]) == (Phase.FORWARD, 41)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        assert theirs.state() == "T"
        theirs.kill()
        other.wait()
        assert theirs.state() == GONE and open_at(path) is None
        assert record[Word.STEP] == 41
    assert open_at(make(1).path) is not None


def test_a_kill_is_told_with_what_may_have_sent_it():
    assert "out-of-memory killer sends" in ending(signal.SIGKILL, 0)
    assert "ended 2 here" in ending(signal.SIGKILL, 2)
    assert ending(signal.SIGSEGV, 0) == "was ended by signal SIGSEGV"
