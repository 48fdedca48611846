"""Opening: what a run says of itself at its start."""

from __future__ import annotations

import torch.distributed as dist

from hsap.data.loader import eval_packing
from hsap.data.packing import count_long
from hsap.train.config import TrainConfig
from hsap.train.inputs import Inputs


def opening(config: TrainConfig, inputs: Inputs, step: int, saves_at_end: bool) -> list[str]:
    """One line on what is about to run, where it goes and whether it stays; one for documents not packed whole.

    step: the last one that is done.
    """
    told = (
        f"hsap: {dist.get_world_size()} ranks on {config.engine.device} ({config.topology}, dp {config.dp}), "
        f"planner {config.planner.name}, {inputs.model.num_params:,} parameters, writing to {config.out}"
    )
    if step == config.train.steps:
        return [f"{told}; step {step} is the last: raise train.steps to go on"]
    if not saves_at_end:
        told += "; the trained model isn't kept: train.save_every=N saves it every N steps and at the end"
    lines = [f"{told}; going on after step {step}" if step else told]
    lines += [f"hsap: {told}" for told in (*inputs.left_out, *inputs.notices)]
    packed = (
        ("documents", inputs.train_data, config.packing, inputs.chats),
        ("held-out documents", inputs.eval_data, eval_packing(config.packing), None),
    )
    for name, data, packing, chats in packed:
        if data is None:
            continue
        long = count_long(data.lengths, data.uncut, packing, chats)
        lines += [f"hsap: of {len(data.ids):,} {name}, {counts}" for counts in long if str(counts)]
    return lines
