"""Simulator: how long a plan takes, what waits for what, and which bytes cross which link.

    cost      what each instruction and message costs on a cluster
    clock     when everything starts and ends, given those costs
    timeline  the result as a value: per plan, per mask and direction

It reads a plan's columns as every interpreter does and knows nothing of planners. Its constants are the cluster
preset's assumptions: it ranks plans, it doesn't promise seconds.
"""

from hsap.sim.timeline import Timeline, Trace, simulate

__all__ = ["Timeline", "Trace", "simulate"]
