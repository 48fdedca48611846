"""Simulator: how long a plan takes, what waits for what, and which bytes cross which link.

    cost      what each instruction and message costs on a cluster
    share     what ranks share of a cluster, and so how fast each thing goes
    clock     when everything starts and ends, given those
    events    the loop that does it
    timeline  the result as a value: per plan, per mask and direction
    spent     what each rank's time goes to, simulated or measured

It reads a plan's columns as every interpreter does and knows nothing of planners. Its constants are the cluster's: on a
machine that `hsap bench calibrate` measured it is held against real runs by `make bench-fidelity`; on those of data
sheets and assumptions it ranks plans and doesn't promise seconds.
"""

from hsap.sim.timeline import Timeline, Trace, simulate

__all__ = ["Timeline", "Trace", "simulate"]
