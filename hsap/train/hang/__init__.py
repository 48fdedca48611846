"""Hang: no rank waits for ever. Every rank says where it is; where none moves, one tells all about all, and all end."""

from hsap.train.hang.watch import Watch, current

__all__ = ["Watch", "current"]
