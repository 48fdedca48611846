"""Calibrate: measure a machine, or several, for the simulator.

machine    all of it: from a machine or cluster to a `Cluster`
measure    microbenchmarks of kernels and memory
links      and of messages, inside nodes and between them
readings   what they say
fit        constants of a `Cluster` from that
processes  run a function on several ranks of one machine, or join those that a launcher started
"""
