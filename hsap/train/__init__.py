"""Train: the run behind train.py.

launch       from the command line to the loop in the right processes (overrides, composing, processes, flags, sweep)
config       the whole configuration, checked (groups: its groups of keys)
inputs       data, model and checkpoint of a run, refused before ranks wait for each other
run          the loop of one rank (opening: what it says first; evaluation: the loss of held-out data)
updates      a rank's part of each optimizer update: loss, gradient, judgement, weights
attention    a rank's attention: how heads are planned, who makes the plans, what the model calls
agreement    what ranks must hold alike (difference: who holds what, and the first difference; facts: of a run)
figures      what a step is said to have done
guard        no update of a step that has gone wrong: who is to blame, dumps and their replay
hang         no rank waits for ever: where each is, and who is at fault where nobody moves
budget       attention's error, measured before the first step
leak         does a document of the first step reach another?
tsp          weights sharded with the tokens (`parallel=tsp`): plans for their heads, and what DeepSpeed is told
capacity     the constant number of rows that ranks are padded to
engine       model, optimizer and DeepSpeed (weights: the model as a rank holds it; gradients: where a step's are)
checkpoints  saved and resumed runs
settings     the configuration, kept in the run's folder
metrics, profile, stopping  what a step says of itself; measured timelines; signals
told         what a rank says when it ends
restarts     ranks that a launcher starts again go on by themselves
loopback     ranks that run on one machine alone are reached from that machine alone
"""
