"""The examples of Trainer and accelerate on two ranks: losses, norms and every parameter's gradient of one process.

With plain SGD what training adds to a parameter is the sum of its gradients, so that trained weights show them.
"""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.integrations.torchrun import EXAMPLES, output_of

pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed here")
pytest.importorskip("accelerate", reason="Hugging Face's accelerate is not installed here")

LEARNING_RATE = 0.25
STEPS, DOCUMENTS_PER_STEP = 4, 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone():
    """Steps of one process over documents one after the other, weights before and after."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import hf_model
    finally:
        sys.path.remove(str(EXAMPLES))
    model = hf_model.small_llama()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    features, told = hf_model.features(STEPS * DOCUMENTS_PER_STEP), []
    for step in range(STEPS):
        documents = features[step * DOCUMENTS_PER_STEP : (step + 1) * DOCUMENTS_PER_STEP]
        total = 0.0
        for document in documents:
            ids = torch.tensor(document["input_ids"])
            total = total + F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        loss = total / sum(len(document["input_ids"]) - 1 for document in documents)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        told.append({"step": step, "loss": loss.item(), "grad_norm": norm.item()})
        optimizer.step()
        optimizer.zero_grad()
    return told, before, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "optimizer"), [("hf_trainer", "sgd"), ("hf_accelerate", "SGD")])
def test_two_ranks_train_as_one_process_does(name, optimizer, alone, tmp_path):
    options = ["--out", str(tmp_path), "--optim", optimizer, "--lr", str(LEARNING_RATE)]
    out = output_of(EXAMPLES / f"{name}.py", 2, "2x1", *options, folder=tmp_path)
    told = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
    wanted, before, after = alone
    assert [one["step"] for one in told] == [one["step"] for one in wanted]
    for one, other in zip(told, wanted):
        assert abs(one["loss"] - other["loss"]) <= 1e-5, (one, other)
        assert abs(one["grad_norm"] / other["grad_norm"] - 1) <= 1e-4, (one, other)
    trained = load_file(tmp_path / "model.safetensors")
    assert trained.keys() == after.keys()
    for parameter, tensor in trained.items():
        added, wanted_added = tensor - before[parameter], after[parameter] - before[parameter]
        assert (added - wanted_added).norm() <= 1e-3 * wanted_added.norm(), parameter
