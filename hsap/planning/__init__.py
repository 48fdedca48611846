"""Planning: plans of micro-batches to come, made by the ranks of an SP group in turn, published, and fetched by all.

compiling  how a micro-batch becomes a plan, as data that another process can be sent
exchange   one rank has a plan made and publishes it, the others fetch it
planned    what loops ask of plans and exchanges, be it one or several a micro-batch
steps      a run's batches with their plans, seen to ahead on a background thread
pool       processes of a rank that plan for it (worker: what runs in each)
"""
