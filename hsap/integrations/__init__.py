"""Integrations: sequence parallelism for training loops that aren't ours.

own_loop      `hsap.SequenceParallel`: groups, plans and shards for any loop in PyTorch
transformers  any causal language model of Hugging Face's (model_config: what its configuration asks for)
trainer       their Trainer
leak          `hsap.check_leak`: does anything of one document reach another?
"""
