"""Benches that are part of the package: they measure a machine for the simulator, or set it beside papers.

processes  run a function on several ranks of one machine, or join those that a launcher started
measure    microbenchmarks of kernels and memory
links      and of messages, inside nodes and between them
fit        constants of a `Cluster` from what was measured
calibrate  all of it: from a machine, or several, to a cluster
paper      what the HSAP and DCP papers measured, simulated on the clusters that they name
"""
