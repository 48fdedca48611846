"""HSAP under Hugging Face's Trainer.

    torchrun --nproc-per-node 2 launch/examples/hf_trainer.py 2x1
    torchrun --nproc-per-node 4 launch/examples/hf_trainer.py 2x1    # two SP groups, data parallel

Prints loss and gradient norm of each step, which depend neither on the topology nor on the number of ranks, and writes
the trained model to the folder that --out names.
"""

from __future__ import annotations

import argparse
import json

import torch
import transformers
from hf_model import features, small_llama

from hsap.integrations.trainer import SequenceParallelTrainer
from hsap.integrations.transformers import sequence_parallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology", nargs="?", default="2x1")
    parser.add_argument("--out", default="outputs/hf_trainer")
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()

    # First, because this joins the job's processes.
    arguments = transformers.TrainingArguments(
        output_dir=given.out,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=4,
        optim=given.optim,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = small_llama()
    sp = sequence_parallel(model, given.topology)
    trainer = SequenceParallelTrainer(model, arguments, train_dataset=features(128), sequence_parallel=sp)
    trainer.train()
    if trainer.is_world_process_zero():
        for step, told in enumerate(trainer.state.log_history[:-1]):
            print(json.dumps({"step": step, "loss": told["loss"], "grad_norm": told["grad_norm"]}), flush=True)
    trainer.save_model(given.out)
    sp.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
