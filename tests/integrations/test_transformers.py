"""Models of transformers under sequence parallelism in a world of one process: families, loss, and what is refused."""

import copy
import importlib.metadata
import importlib.util
import itertools
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.utils import _apply_to_tensors
from torch.utils.data import DataLoader

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed here")

import hsap  # noqa: E402
from hsap.integrations.model_config import read_heads  # noqa: E402
from hsap.integrations.transformers import Collator, sequence_parallel  # noqa: E402
from tests.integrations import stock  # noqa: E402
from tests.integrations.stock import NO_DROPOUT, SHARED, build  # noqa: E402

LENGTHS = [23, 1, 40, 9]
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
LLAMA4_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "llama": ("Llama", SHARED),
    "llama_yarn": ("Llama", {**SHARED, "rope_parameters": LLAMA4_ROPE}),
    "mistral": ("Mistral", {**SHARED, "sliding_window": 7, "head_dim": 10}),
    "qwen2": ("Qwen2", {**SHARED, **WINDOWS, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**SHARED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {**SHARED, **CAPS, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 24}),
    "phi_with_a_biased_head": ("Phi", SHARED),
    "gpt2": (
        "GPT2",
        {"model": "GPT2LMHeadModel", "n_inner": 28, "scale_attn_by_inverse_layer_idx": True, **NO_DROPOUT},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(family, **more):
    model = build(family, **more)
    return model, sequence_parallel(model, "1x1", loss_chunk_tokens=16)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_each_document_alone(name):
    family, more = FAMILIES[name]
    model, sp = prepared(family, **more)
    features = stock.documents(LENGTHS)
    batch = Collator(sp)(features)
    loss = model(**batch, loss_scale=sp.loss_scale(batch["hsap"].num_targets)).loss
    loss.backward()
    other = build(family, **more).train()
    expected = stock.loss(other, features)
    expected.backward()
    assert abs(loss.item() - expected.item()) <= 1e-5
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None
            continue
        assert (parameter.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-9, name


def test_trainer_s_count_divides_and_no_labels_give_logits():
    model, sp = prepared("Llama", **SHARED)
    features = stock.documents(LENGTHS)
    batch = Collator(sp)(features)
    count = stock.num_targets(features)
    assert batch["hsap"].num_targets == count == (batch["shift_labels"] != -100).sum()
    by_count = model(**batch, num_items_in_batch=torch.tensor(count)).loss
    by_scale = model(**batch, loss_scale=sp.loss_scale(count)).loss
    torch.testing.assert_close(by_count, by_scale)
    shard = sp.load(LENGTHS)
    output = model(input_ids=batch["input_ids"], hsap=shard)
    assert output.loss is None and output.logits.shape == (1, sum(LENGTHS), 61)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch, num_items_in_batch=count).loss, by_count)


def test_documents_without_targets_cost_nothing():
    model, sp = prepared("Llama", **SHARED)
    batch = Collator(sp)([{"input_ids": [5]}, {"input_ids": [7], "labels": [-100]}])
    loss = model(**batch, loss_scale=sp.loss_scale(batch["hsap"].num_targets)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())
    empty = Collator(sp)([])
    assert empty["input_ids"].shape == (1, 0)
    model(**empty, loss_scale=sp.loss_scale(0)).loss.backward()


def test_a_step_without_targets_is_nothing_to_trainer_too():
    model, sp = prepared("Llama", **SHARED)
    for count in (0, torch.tensor(0)):
        batch = Collator(sp)([{"input_ids": [7, 8], "labels": [-100, -100]}])
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        assert loss.item() == 0
        assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_a_model_that_diverged_says_so_by_its_loss():
    model, sp = prepared("Llama", **SHARED)
    with torch.no_grad():
        model.lm_head.weight[0] = torch.nan
    assert forward(model, sp).loss.isnan()


def test_batches_of_another_model_are_refused():
    _, other = prepared("Mistral", **SHARED, sliding_window=3)
    model, _ = prepared("Mistral", **SHARED, sliding_window=7)
    with pytest.raises(ValueError, match=r"window:3.*window:7.*this model"):
        forward(model, other)


def test_a_batch_goes_through_fsdp_s_casts_as_it_is():
    """FSDP2 rebuilds dataclasses among the arguments of a forward, and of every layer."""
    model, sp = prepared("Llama", **SHARED)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    expected = forward(model, sp).loss.item()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, _apply_to_tensors(lambda tensor: tensor, kwargs)), with_kwargs=True
        )
    assert forward(model, sp).loss.item() == expected
    model = build("Llama", **SHARED)
    sp = sequence_parallel(model, "1x1", dtype="bf16")
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    loss = forward(model, sp).loss
    loss.backward()
    assert abs(loss.item() / expected - 1) < 0.005
    with pytest.raises(ValueError, match=r"loss_scale came as torch\.bfloat16.*cast_forward_inputs=False"):
        forward(model, sp, loss_scale=torch.tensor(1.0))


def test_autocast_takes_the_head_s_dtype():
    model = build("Llama", **SHARED)
    sp = sequence_parallel(model, "1x1", dtype="bf16")
    features = stock.documents(LENGTHS)
    batch = Collator(sp)(features)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch, loss_scale=sp.loss_scale(batch["hsap"].num_targets)).loss
    loss.backward()
    expected = stock.loss(build("Llama", **SHARED), features)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 0.02
    assert loss.dtype == torch.float32 and model.lm_head.weight.grad.dtype == torch.float32


def test_stock_attention_can_be_put_back():
    model, _ = prepared("Llama", **SHARED)
    model.set_attn_implementation("eager")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, build("Llama", **SHARED)(input_ids=ids).logits)


def test_a_copy_of_a_model_computes_the_same():
    model, sp = prepared("Llama", **SHARED)
    batch = Collator(sp)(stock.documents(LENGTHS))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    losses = [one(**batch, num_items_in_batch=1).loss.item() for one in (model, twin)]
    assert losses[0] != losses[1]


REFUSED = {
    "soft cap": ("Gemma2", {**SHARED, "final_logit_softcapping": None, "head_dim": 8}, "attn_logit_softcapping"),
    "soft cap of logits": ("Gemma2", {**SHARED, "attn_logit_softcapping": None, "head_dim": 8}, "final_logit_softcapp"),
    "sinks": ("GptOss", {**SHARED, "head_dim": 8, "num_local_experts": 2}, "sinks"),
    "dropout": ("Llama", {**SHARED, "attention_dropout": 0.1}, "attention_dropout"),
    "dropout of gpt2": ("GPT2", {"model": "GPT2LMHeadModel", "n_inner": 28}, "attn_pdrop"),
    "chunks": ("Llama4Text", {**SHARED, "model": "Llama4ForCausalLM", "intermediate_size_mlp": 28}, "attention_chunk"),
    "alibi": ("Falcon", {"alibi": True}, "alibi"),
    "alibi by design": ("Bloom", {}, "position_ids"),
    "own attention": ("Falcon", {}, "attention of its own"),
    "two-way": ("Gemma3Text", {**SHARED, "model": "Gemma3ForCausalLM", "use_bidirectional_attention": True}, "causal"),
    "not causal": ("Llama", {**SHARED, "is_causal": False}, "causal"),
    "positions from 2": (
        "Roberta",
        {"is_decoder": True, **{f"{name}_dropout_prob": 0.0 for name in ("hidden", "attention_probs")}},
        "counts positions",
    ),
    "latent": ("DeepseekV3", {"n_routed_experts": 4, "n_group": 2}, "128 elements a head"),
    "scan": ("FalconH1", SHARED, "outside of attention"),
    "rope by length": (
        "Llama",
        {**SHARED, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rotary scaling",
    ),
    "encoder and decoder": ("T5", {"model": "T5ForConditionalGeneration", "num_layers": 1}, "is_encoder_decoder"),
    "no language model": ("Llama", {**SHARED, "model": "LlamaModel"}, "lm head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_left_out_is_refused_by_name(name):
    family, more, told = REFUSED[name]
    with pytest.raises(ValueError, match=told) as error:
        sequence_parallel(build(family, **more), "1x1")
    assert "\n" not in str(error.value)


def test_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match="whose layers are alike"):
        read_heads(transformers.Gemma4TextConfig(), "fp32")
    with pytest.raises(ValueError, match="num_attention_heads"):
        read_heads(transformers.MambaConfig(), "fp32")


def test_without_transformers_it_says_what_to_install(monkeypatch):
    import hsap.integrations.transformers as here

    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("hsap_without_transformers", here.__file__)
    with pytest.raises(ImportError, match=r"pip install 'hsap\[transformers\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_trainer_that_goes_on_in_another_order_is_refused(monkeypatch):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    import hsap.integrations.trainer as here

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.19.0" if name == "transformers" else real(name))
    spec = importlib.util.spec_from_file_location("hsap_with_an_old_trainer", here.__file__)
    with pytest.raises(ImportError, match=r"hsap\[transformers\].*5\.20 .* found transformers==5\.19"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_only_a_model_of_transformers_is_prepared_with_chunks_of_some_rows():
    model = build("Llama", **SHARED)
    for other in (nn.Sequential(model), torch.compile(model)):
        with pytest.raises(ValueError, match="before whatever wraps"):
            sequence_parallel(other, "1x1")
    for rows in (0, -5):
        with pytest.raises(ValueError, match="loss_chunk_tokens"):
            sequence_parallel(model, "1x1", loss_chunk_tokens=rows)
    sp = sequence_parallel(model, "1x1", masks=hsap.Mask.parse("window:3"))
    assert [str(mask) for mask in sp.layer_masks] == ["window:3"]
    scaled = build("Llama", **SHARED)
    scaled.lm_head.__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x) * 2})
    with pytest.raises(ValueError, match="no lm head that is a linear layer"):
        sequence_parallel(scaled, "1x1")
    model.resize_token_embeddings(70)
    with pytest.raises(ValueError, match="before sequence_parallel"):
        forward(model, sp)


def test_a_model_is_prepared_once():
    model, _ = prepared("Llama", **SHARED)
    with pytest.raises(ValueError, match="once"):
        sequence_parallel(model, "1x1")


def test_a_model_in_tensor_parallel_shares_is_refused():
    model = build("Llama", **SHARED)
    model._tp_size = 2
    with pytest.raises(ValueError, match="tp_plan"):
        sequence_parallel(model, "1x1")


def forward(model, sp, **more):
    batch = Collator(sp)(stock.documents(LENGTHS))
    return model(**{**batch, "loss_scale": 1.0, **more})


REFUSED_FORWARDS = {
    "scaled logits": ("Cohere", SHARED, {}, "changes its logits"),
    "a mean over own targets": ("Llama", SHARED, {"loss_scale": None}, "num_items_in_batch"),
    "labels to shift": ("Llama", SHARED, {"shift_labels": None}, "shift_labels"),
    "padding": ("Llama", SHARED, {"attention_mask": torch.ones(1, 73)}, "attention_mask"),
    "cache": ("Llama", SHARED, {"use_cache": True}, "use_cache"),
    "no shard": ("Llama", SHARED, {"hsap": None}, "needs hsap"),
    "a scale that was rounded": ("Llama", SHARED, {"loss_scale": torch.ones((), dtype=torch.bfloat16)}, "rounds loss"),
    "other rows": ("Llama", SHARED, {"input_ids": torch.zeros(1, 5, dtype=torch.long)}, r"\[1, 73\]"),
    "weights of attention": ("Llama", SHARED, {"output_attentions": True}, "output_attentions"),
    "arguments that attention doesn't get": ("StableLm", SHARED, {}, "hand its forward's arguments down"),
}


@pytest.mark.parametrize("name", REFUSED_FORWARDS)
def test_forwards_that_would_be_wrong_are_refused(name):
    family, more, arguments, told = REFUSED_FORWARDS[name]
    model, sp = prepared(family, **more)
    with pytest.raises(ValueError, match=told) as error:
        forward(model, sp, **arguments)
    assert "\n" not in str(error.value)


def test_a_layer_s_wishes_must_be_those_of_the_configuration():
    model, sp = prepared("Mistral", **SHARED, sliding_window=7)
    model.config.sliding_window = 9
    with pytest.raises(ValueError, match="sliding_window=9"):
        forward(model, sp)
    model, sp = prepared("Llama", **SHARED)
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="layer 1 asks its attention for dropout"):
        forward(model, sp)
    model, sp = prepared("Llama", **SHARED)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        forward(model, sp)


def test_features_that_are_no_documents_are_refused():
    _, sp = prepared("Llama", **SHARED)
    collate = Collator(sp)
    with pytest.raises(ValueError, match="padded"):
        collate([{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}])
    with pytest.raises(ValueError, match="document 0"):
        collate([{"input_ids": [1, 2, 0], "labels": [1, 2]}])
    with pytest.raises(ValueError, match="document 0 has no input_ids"):
        collate([{"text": "one"}])
    with pytest.raises(ValueError, match="whole numbers"):
        collate([{"input_ids": [1, 2], "labels": [1.5, 2.5]}])
    with pytest.raises(ValueError, match="layout: lengths"):
        collate([{"input_ids": []}])
    short = collate([{"input_ids": np.array([1, 2], dtype=np.uint16), "labels": None, "attention_mask": None}])
    assert short["input_ids"].tolist() == [[1, 2]] and short["shift_labels"].tolist() == [[2, -100]]


def test_batches_are_not_loaded_in_workers():
    _, sp = prepared("Llama", **SHARED)
    loader = DataLoader(stock.documents([3, 4]), 2, num_workers=1, collate_fn=Collator(sp))
    with pytest.raises(ValueError, match="num_workers=0"):
        next(iter(loader))


TRAINER_S = {
    "average_tokens_across_devices": False,
    "label_smoothing_factor": 0.1,
    "dataloader_num_workers": 2,
    "batch_eval_metrics": True,
    "neftune_noise_alpha": 5.0,
    "train_sampling_strategy": "group_by_length",
}


@pytest.mark.parametrize("name", TRAINER_S)
def test_trainer_s_arguments_that_change_the_loss_are_refused(name, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from hsap.integrations.trainer import check_arguments

    check_arguments(transformers.TrainingArguments(tmp_path, use_cpu=True))
    with pytest.raises(ValueError, match=name) as error:
        check_arguments(transformers.TrainingArguments(tmp_path, use_cpu=True, **{name: TRAINER_S[name]}))
    assert "\n" not in str(error.value)


def test_trainer_deals_documents_to_sp_groups_and_evaluates(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from hsap.integrations.trainer import SequenceParallelTrainer

    model, sp = prepared("Llama", **SHARED)
    arguments = transformers.TrainingArguments(
        tmp_path, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=4, report_to="none"
    )
    features = stock.documents([3, 4, 5, 6, 7, 8])
    trainer = SequenceParallelTrainer(
        model, arguments, train_dataset=features, eval_dataset=stock.documents(LENGTHS), sequence_parallel=sp
    )
    expected = stock.loss(build("Llama", **SHARED), stock.documents(LENGTHS)).item()
    assert abs(trainer.evaluate()["eval_loss"] - expected) <= 1e-5
    # Batches that hold different numbers of targets.
    trainer.args.per_device_eval_batch_size = 3
    assert abs(trainer.evaluate()["eval_loss"] - expected) <= 1e-5
    assert abs(trainer.predict(stock.documents(LENGTHS)).metrics["test_loss"] - expected) <= 1e-5
    seen = []
    for dp_rank in range(2):
        trainer.sequence_parallel = SimpleNamespace(dp_size=2, dp_rank=dp_rank)
        trainer.data_collator = lambda documents: [len(one["input_ids"]) for one in documents]
        batches = list(trainer.get_train_dataloader())
        assert [len(batch) for batch in batches] == [2, 1]
        seen += [length for batch in batches for length in batch]
    assert sorted(seen) == [3, 4, 5, 6, 7, 8] and seen != sorted(seen)


def test_trainer_goes_on_where_it_stopped_and_shuffles_each_epoch(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from hsap.integrations.trainer import SequenceParallelTrainer

    def train(folder, resume=None):
        drawn = []

        def collate(features):
            drawn.append([len(one["input_ids"]) for one in features])
            return Collator(sp)(features)

        model, sp = prepared("Llama", **SHARED)
        arguments = transformers.TrainingArguments(
            *(folder,),
            use_cpu=True,
            per_device_train_batch_size=2,
            num_train_epochs=3,
            save_steps=5,
            learning_rate=0.01,
            report_to="none",
            disable_tqdm=True,
        )
        features = stock.documents([3, 4, 5, 6, 7, 8])
        trainer = SequenceParallelTrainer(
            model, arguments, train_dataset=features, sequence_parallel=sp, data_collator=collate
        )
        trainer.train(resume_from_checkpoint=resume)
        return drawn, model

    drawn, model = train(tmp_path / "one")
    epochs = [drawn[i : i + 3] for i in (0, 3, 6)]
    assert all(sorted(itertools.chain(*epoch)) == [3, 4, 5, 6, 7, 8] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again, resumed = train(tmp_path / "two", resume=str(tmp_path / "one" / "checkpoint-5"))
    assert again == drawn[5:]
    for one, other in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(one, other)
