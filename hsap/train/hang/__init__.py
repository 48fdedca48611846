"""Hang: no rank waits for ever. Every rank says where it is; where none moves, one tells all about all, and all end.

watch      a thread of every rank that sees whether anybody moves, and ends the run where nobody does
shared     where ranks of a machine keep their positions, open to each other
beats      and what they tell of them to other machines
processes  what the system knows of a rank's process, and how one ended
sight      one rank as another sees it
telling    of many sights one message: who is at fault, and who waits
"""

from hsap.train.hang.watch import Watch, current

__all__ = ["Watch", "current"]
