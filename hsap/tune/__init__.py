"""Tuner: which way of running a model on a cluster fits, and how fast, without a GPU.

    stages       attention from a strategy: seconds and arena, without instructions (counted, ends,
                 contention, live: its parts)
    memory       what a rank holds while it trains, item by item (activations: of its rows)
    step         one optimizer step, ZeRO's traffic (collectives) and the optimizer among it
    choices      which shapes are legal, and in words why others aren't
    search       all of them priced and ranked (job, setting: what is searched; attention, room: what of it takes how
                 long, and fits; found: what comes of it)
    estimate     the longest pack that memory holds, where time isn't asked for
    table, experiment, trials     what becomes of the best

It needs no torch: shapes, lengths and a cluster's figures are enough.
"""
