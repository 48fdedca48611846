"""Compiler: from a planner's choice to the streams of all ranks, one pass a file; `pipeline` runs them in this order.

order        the transfers that a schedule needs, on its time axis
relay        those that cross a node border do so once
prefetch     they leave earlier, and are waited for later, than they must
widen        what neighbouring head groups do alike is done once
lay          rounds (which transfers go at once), trays (where rows lie), messages, and fuse (what is one kernel)
lower        one column's instructions and buffers
expand       the streams of all inter x intra ranks
buffers      places in the arena
"""
