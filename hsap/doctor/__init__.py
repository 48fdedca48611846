"""Doctor: is this machine, or this cluster, fit to train on? `hsap doctor` prints one page.

examine   all of it, in one process or on a launcher's ranks
report    lines with a status each
versions  what is installed, and what is missing
devices   GPUs, and what ranks talk through
kernels   every attention kernel of this hardware beside float64 (oracle: what that is)
links     messages between all ranks: what arrives, and how fast
system    disk, memory, limits
config    what train.py would refuse of a configuration
"""
