"""Checkpoints: OUT/checkpoints/stepN, and `latest`, the file that names the newest.

A checkpoint is plain data, read without unpickling, and belongs to no number of ranks, topology or ZeRO stage:

- rankR.safetensors, one of every rank that saved: what it held of the float32 weights and of Adam's two moments, as
  pieces of flattened parameters named KIND:START:PARAMETER, and the state of the rank's random numbers. A piece of
  some columns of a matrix, as TSP shards them, is KIND:START+SKIP/WIDTH/STRIDE:PARAMETER (`tensors.Columns`). A rank
  that loads takes the pieces it needs from all of them. (DeepSpeed's universal checkpoint is the same idea in another
  form: a second copy, made afterwards by a tool of its own, of files that must be unpickled.)
- hsap.json: step, data cursor, Adam's step, topology, planner, the whole configuration, what a resumed run must share
  with this one (`identity`), and size and SHA-256 of every other file; last, its own SHA-256.

Which documents went into which steps follows from the seed and the cursor, whatever the number of ranks; the learning
rate follows from the step.
"""
