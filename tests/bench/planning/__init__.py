"""Bench of planning: balance, bytes and time of every planner on packs like those of real corpora."""
