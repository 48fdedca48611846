"""Leak: does anything of one document reach another? Changes tokens of a real batch and compares all other rows.

reach     which rows may change when some tokens do: by the masks' own slices, layer by layer
changes   which tokens are changed, and documents in another order
sketch    a tensor's rows in a few numbers each: their bits, and their size
hooks     on a model's modules
ranks     what all ranks together have seen
compare   which rows of two runs differ that mustn't, and in which layer that begins
probe     the runs, and what they show
report    in words
"""
