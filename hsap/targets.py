"""Targets: what a row is to predict, as data give it and losses take it."""

NO_TARGET = -100
"""The target of a row that nothing is predicted from (PyTorch's default ignore_index)."""
