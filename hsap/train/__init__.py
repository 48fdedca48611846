"""Train: the run behind train.py.

launch       from the command line to the loop in the right processes (overrides, processes, flags, sweep)
config       the whole configuration, checked
inputs       data, model and checkpoint of a run, refused before ranks wait for each other
run          the loop of one rank (opening: what it says first; evaluation: the loss of held-out data)
attention    a rank's attention: how heads are planned, who makes the plans, what the model calls
agreement    what ranks must hold alike (difference: who holds what, and the first difference; facts: of a run)
figures      what a step is said to have done
guard        no update of a step that has gone wrong: who is to blame, dumps and their replay
budget       attention's error, measured before the first step
tsp          weights sharded with the tokens (`parallel=tsp`): plans for their heads, and what DeepSpeed is told
capacity     the constant number of rows that ranks are padded to
engine       model, optimizer and DeepSpeed
checkpoints  saved and resumed runs
settings     the configuration, kept in the run's folder
metrics, profile, stopping  what a step says of itself; measured timelines; signals
"""
