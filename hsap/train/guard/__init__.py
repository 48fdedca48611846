"""Guarding: no update is made of a step whose loss or gradient isn't finite, or, if asked for, leaps.

judge      whether a step's loss and gradient norm are to be trusted, the same on all ranks
finding    who is to blame: the step once more with hooks, to name documents, rank and layer
dump       the step as a folder of plain data: batch, plans, weights, what was seen
replay     a dump once more on one process
guard      judges every step, and sees to what is set for those gone wrong
outputs    hooks on a model's modules: the first output that isn't finite
"""
