"""Integrations: sequence parallelism for training loops that aren't ours.

own_loop      `hsap.SequenceParallel`: groups and plans for any loop in PyTorch
  shard       what a rank has of a micro-batch (documents: what a loop gives of it; places: groups made by the loop)
transformers  any causal language model of Hugging Face's (model_config: what its configuration asks for)
  adapter     its forward, from arguments to loss (attend: what its layers call; collator: documents as arguments)
trainer       their Trainer
leak          `hsap.check_leak`: does anything of one document reach another?
"""
