"""One rank of the ZeRO-3 test: trains on its own rows, compares parameters with one float64 process on all rows."""

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from packed_oracle import dense_attention, random_pack

from hsap.models import Llama, ModelConfig, build_model, initialise
from hsap.models.mlp import SwiGLU

LEARNING_RATE = 0.1
# Per step and rank: lengths of its documents. Ranks differ in rows and loss chunks, and some have no rows at all.
STEPS = [([7, 30], []), ([], [3, 1]), ([9], [20, 20])]
ENGINE = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def partitioned(config: ModelConfig, seed: int) -> Llama:
    with deepspeed.zero.Init(config_dict_or_path=ENGINE):
        model = Llama(config)
    initialise(model, seed, gathered=lambda p: deepspeed.zero.GatheredParameters([p], modifier_rank=0))
    return model


def share(step: int, rank: int):
    lengths = STEPS[step][rank]
    return *random_pack(lengths, 61, seed=10 * step + rank), dense_attention(lengths)


def num_targets(step: int) -> int:
    return sum(int((share(step, rank)[2] >= 0).sum()) for rank in (0, 1))


def train_alone(config: ModelConfig) -> Llama:
    model = build_model(config, seed=1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        for rank in (0, 1):
            tokens, positions, targets, attention = share(step, rank)
            (model(tokens, positions, attention, targets) / num_targets(step)).backward()
        optimizer.step()
    return model


def train_partitioned(config: ModelConfig, rank: int, from_start: bool) -> Llama:
    model = partitioned(config, seed=1) if from_start else build_model(config, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if config.mlp_chunk_tokens is not None:
        ungathered(model)
        set_z3_leaf_modules(model, [SwiGLU])
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ENGINE)[0]
    for step in range(len(STEPS)):
        tokens, positions, targets, attention = share(step, rank)
        loss = engine(tokens, positions, attention, targets)
        engine.backward(loss * 2 / num_targets(step))
        engine.step()
    return engine.module


def ungathered(model: Llama) -> None:
    """Weights that nobody gathers are missed."""
    try:
        model.model.layers[0].mlp(torch.zeros(3, 32))
    except ValueError as error:
        assert "set_z3_leaf_modules(model, [SwiGLU])" in str(error)
    else:
        raise AssertionError("nobody missed the weights")


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for the better part of a minute
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    cases = ((True, "selective", True, 5), (False, "selective", False, None), (True, "none", False, None))
    for tied, checkpointing, from_start, mlp_rows in cases:
        ways = {"checkpointing": checkpointing, "loss_chunk_tokens": 8, "mlp_chunk_tokens": mlp_rows}
        config = ModelConfig(61, 2, 32, 4, 2, 8, 48, tied_embeddings=tied, **ways)
        expected = dict(train_alone(config).named_parameters())
        for name, parameter in train_partitioned(config, rank, from_start).named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                error = (parameter - expected[name]).abs().max().item()
            assert error < 5e-7, f"rank {rank}, tied {tied}, {checkpointing}: {name} is off by {error}"
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
