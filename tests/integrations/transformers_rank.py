"""One rank of four: Hugging Face models under sequence parallelism with DeepSpeed and FSDP2, beside stock ones."""

from __future__ import annotations

import gc
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hsap
from hsap.checks.gradients import full_grad
from hsap.integrations.transformers import Collator, sequence_parallel
from tests.integrations import stock

LEARNING_RATE = 0.05
FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 9, "head_dim": 12},
}
# Family, topology, ZeRO stage, whether layers are recomputed in backward.
CASES = [
    ("Llama", "2x2", 3, False),
    ("Qwen2", "2x2", 1, False),
    ("Mistral", "2x2", 2, True),
    ("Llama", "4x1", 1, True),
    ("Qwen2", "4x1", 3, False),
    ("Mistral", "4x1", 0, False),
    ("Mistral", "2x1", 2, False),
]
# Documents of each step and micro-step, dealt to the SP groups; in the second step most ranks have no rows at all.
STEPS = [[[70, 1, 33, 5], [1, 90, 40]], [[2, 1], [3]]]


def build(family: str):
    return stock.build(family, num_key_value_heads=2, **FAMILIES[family])


def train_alone(family: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of each step."""
    model, made = build(family), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step, micro_steps in enumerate(STEPS):
        loss = stock.loss(model, [one for i, micro in enumerate(micro_steps) for one in documents(step, i, micro)])
        loss.backward()
        made.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return made


def documents(step: int, micro: int, lengths: list[int]) -> list[dict]:
    return stock.documents(lengths, seed=10 * step + micro)


def train(family: str, topology: str, stage: int, recompute: bool) -> None:
    expected = train_alone(family) if dist.get_rank() == 0 else None
    model = build(family)
    if recompute:
        model.gradient_checkpointing_enable()
    sp = sequence_parallel(model, topology, loss_chunk_tokens=16)
    collate = Collator(sp)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    for step, micro_steps in enumerate(STEPS):
        batches = [collate(documents(step, i, micro)[sp.dp_rank :: sp.dp_size]) for i, micro in enumerate(micro_steps)]
        scale = sp.loss_scale(sum(batch["hsap"].num_targets for batch in batches), accumulation=2)
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            loss = engine(**batch, loss_scale=scale).loss
            engine.backward(loss)
            total += loss.detach() / 2 / dist.get_world_size()
            if i == 1:
                gradients = {name: full_grad(p) for name, p in engine.module.named_parameters()}
            engine.step()
        dist.all_reduce(total)
        if expected is not None:
            compare(f"{family} {topology} ZeRO {stage} step {step}", total.item(), gradients, *expected[step])
            if stage:
                norm, wanted = float(engine.get_global_grad_norm()), stock.norm(expected[step][1].values())
                assert abs(norm / wanted - 1) <= 1e-4, f"{family} {topology}: norm {norm}, {wanted}"
    engine.destroy()
    del engine
    gc.collect()
    dist.barrier()


def train_by_fsdp(family: str, topology: str) -> None:
    expected = train_alone(family) if dist.get_rank() == 0 else None
    model = build(family)
    sp = sequence_parallel(model, topology)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    hsap.check_leak(model, stock.documents([31, 40, 17]), sp=sp).check()
    for step, micro_steps in enumerate(STEPS):
        batch = Collator(sp)([one for i, micro in enumerate(micro_steps) for one in documents(step, i, micro)])
        loss = model(**batch, loss_scale=sp.loss_scale(batch["hsap"].num_targets)).loss
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        if expected is not None:
            compare(f"{family} {topology} FSDP2 step {step}", mean.item(), gradients, *expected[step])
        optimizer.step()
        optimizer.zero_grad()


def compare(case: str, loss: float, gradients: dict, wanted_loss: float, wanted: dict) -> None:
    assert abs(loss - wanted_loss) <= 1e-5, f"{case}: loss {loss}, {wanted_loss}"
    ratio = stock.norm(gradients.values()) / stock.norm(wanted.values())
    assert abs(ratio - 1) <= 1e-4, f"{case}: norm is {ratio} times what it should be"
    assert gradients.keys() == wanted.keys()
    whole = stock.norm(wanted.values())
    errors = {name: stock.norm([gradients[name] - wanted[name]]) / whole for name in wanted}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, f"{case}: gradient of {worst} is off by {errors[worst]} of the whole gradient's norm"
    print(f"{case}: loss off by {abs(loss - wanted_loss):.1e}, norm by {abs(ratio - 1):.1e}, {errors[worst]:.1e}")


def check_leaks(family: str, topology: str) -> None:
    """Another document in the place of one changes no bit of the others' logits."""
    model = build(family)
    sp = sequence_parallel(model, topology)
    lengths = [31, 40, 17]
    features = stock.documents(lengths)
    ids = torch.cat([one["input_ids"] for one in features])
    other = ids.clone()
    other[31:71] = (other[31:71] + 1) % 61
    shard = sp.load(lengths)
    with torch.no_grad():
        before, after = (model(input_ids=shard.take(x)[None], hsap=shard).logits[0] for x in (ids, other))
        changed = (before != after).any(dim=1)
    inside = (shard.rows >= 31) & (shard.rows < 71)
    assert not changed[~inside].any(), "a document leaks into another"
    assert changed[inside].all(), "no row of the changed document may stay"
    # And they are what each document has alone.
    for row, logits in zip(shard.rows.tolist(), before):
        document = 0 if row < 31 else 1 if row < 71 else 2
        if row in (0, 30, 31, 70, 71, 87):
            alone = build(family)(input_ids=features[document]["input_ids"][None]).logits[0]
            torch.testing.assert_close(logits, alone[row - [0, 31, 71][document]], rtol=1e-4, atol=1e-5)
    hsap.check_leak(model, features, sp=sp).check()
    collate = Collator(sp)

    def as_one(documents):
        """What a loop does that forgets the borders."""
        batch = collate([{name: torch.cat([one[name] for one in documents]) for name in ("input_ids", "labels")}])
        return model(**batch, loss_scale=1.0).loss, batch["hsap"]

    report = hsap.check_leak(model, features, as_one, sp=sp)
    where = {leak.where for leak in report.leaks if leak.direction == "forward"}
    # Laid in another order, documents have other positions besides, which run on.
    assert where == {"model.layers.0", "model.rotary_emb"}, f"{where}: {report}"
    assert report.leaks[0].told == "document 1" and report.leaks[0].documents == ("2",), str(report)
    assert all(parameter.grad is None for parameter in model.parameters())


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for the better part of a minute
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    cases = [case for case in CASES if len(sys.argv) < 2 or case[1] in sys.argv[1:]]
    check_leaks("Mistral", "2x2")
    check_leaks("Llama", "4x1")
    for case in cases:
        train(*case)
    train_by_fsdp("Qwen2", "2x2")
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
