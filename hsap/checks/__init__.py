"""Checks: what `hsap check` runs of a configuration, with the user's own model, data and ranks.

launch      from the command line to the check in the right processes, as train.py starts
__main__    what each of those ranks runs
small       the batch made small
gradients   whole gradients of a step, however they are partitioned
alone       the same step in one process, without DeepSpeed
difference  how far two steps are apart, and how far they may be
parity      `hsap check parity`
leak        `hsap check leak`
error       `hsap check error`, in this process alone
"""
