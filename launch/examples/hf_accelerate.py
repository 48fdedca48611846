"""HSAP under Hugging Face's accelerate.

    torchrun --nproc-per-node 2 launch/examples/hf_accelerate.py 2x1
    torchrun --nproc-per-node 4 launch/examples/hf_accelerate.py 2x1    # two SP groups, data parallel

Prints loss and gradient norm of each step, which depend neither on the topology nor on the number of ranks, and writes
the trained model to the folder that --out names.
"""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator
from hf_model import features, small_llama
from torch.utils.data import DataLoader, DistributedSampler

from hsap.integrations.transformers import Collator, sequence_parallel

ACCUMULATION = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology", nargs="?", default="2x1")
    parser.add_argument("--out", default="outputs/hf_accelerate")
    parser.add_argument("--optim", default="AdamW")
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATION)
    model = small_llama()
    sp = sequence_parallel(model, given.topology)
    optimizer = getattr(torch.optim, given.optim)(model.parameters(), lr=given.lr)
    # accelerate would give each rank documents of its own; the ranks of an SP group share theirs.
    model, optimizer = accelerator.prepare(model, optimizer)
    data = features(64)
    sampler = DistributedSampler(data, sp.dp_size, sp.dp_rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // sp.dp_size, sampler=sampler, collate_fn=Collator(sp))

    batches = iter(loader)
    for step, micro_batches in enumerate(zip(*[batches] * ACCUMULATION)):
        # The targets of the whole step are counted before its first backward.
        scale = sp.loss_scale(sum(batch["hsap"].num_targets for batch in micro_batches), ACCUMULATION)
        total = 0.0
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = model(**batch, loss_scale=scale).loss
                accelerator.backward(loss)
                total += loss.detach() / ACCUMULATION
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(total, reduction="mean")
        if accelerator.is_main_process:
            print(json.dumps({"step": step, "loss": mean.item(), "grad_norm": norm.item()}), flush=True)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(given.out)
    sp.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
