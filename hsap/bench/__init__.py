"""Benches that are part of the package: they measure a machine for the simulator.

processes  run a function on several ranks of one machine
measure    microbenchmarks of kernels, memory and links
fit        constants of a `Cluster` from what was measured
calibrate  all of it: from a machine to a cluster
"""
