"""Error budget: what bf16 on the wire costs is measured, and what is taken, or refused, for it."""

import dataclasses

import numpy as np
import pytest
import torch

import hsap
from hsap.runtime.accuracy import exact_attention, random_inputs
from hsap.train.budget import JUDGED, TENSORS, judge, measure, weigh
from hsap.train.inputs import read_inputs
from tests.parity import Case, arguments, write_data
from tests.parity.rank import configure
from tests.train.batches import micro_batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Eight ranks in bf16 with bf16 on the wire, and their inputs; two masks."""
    folder = tmp_path_factory.mktemp("budget")
    case = Case("8x1", dtype="bf16", masks="window:24+causal", planner="zigzag")
    more = ["wire_dtype=bf16", "check.error_budget=1.05"]
    config = configure([*arguments(case, write_data(folder), folder / "out"), *more], 8)
    return config, read_inputs(config)


def test_exact_attention_is_torch_s_own_in_float64():
    problem = hsap.Problem(hsap.Layout.from_lengths([5, 1, 9]), hsap.HeadShape(4, 2, 8), hsap.Topology(1, 1))
    inputs = random_inputs(problem, torch.float64)
    o, lse, dq, dk, dv = exact_attention(problem, *inputs)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    parts = []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 15)):
        heads = (x[rows].transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        part = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        parts.append(part.transpose(0, 1))
    torch.cat(parts).backward(inputs[3])
    for got, want in ((o, torch.cat(parts)), (dq, q.grad), (dk, k.grad), (dv, v.grad)):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
    assert lse.shape == (4, 15) and float(lse[0, 5]) == pytest.approx(float((q[5, 0] * k[5, 0]).sum()) / 8**0.5)


def test_a_wire_in_bf16_is_measured_and_widened(prepared):
    config, inputs = prepared
    narrow, wide = weigh(config, inputs, CPU)
    assert (narrow.wire, wide.wire) == ("bf16", "fp32") and narrow.split.shape == (2, len(TENSORS))
    assert (narrow.alone == wide.alone).all() and narrow.worst[0] > 1.05 > wide.worst[0]
    # bf16 has 8 bits: a device alone rounds its output to half of the last one, about a thousandth of what it is.
    judged = [TENSORS.index(name) for name in JUDGED]
    assert (narrow.alone[:, judged] > 1e-4).all() and (narrow.alone[:, judged] < 1e-2).all()
    assert narrow.worst[1] in JUDGED and narrow.worst[2] in ("window:24", "causal")
    worst = [(one.wire, *one.worst) for one in (narrow, wide)]
    found, told = judge(config, worst)
    assert found == dataclasses.replace(config, wire_dtype="fp32")
    assert f"{narrow.worst[0]:.2f} times one device's error with bf16 on the wire" in told
    assert told.endswith("this run takes wire_dtype=fp32") and "\n" not in told


def test_what_keeps_to_the_budget_stays_and_what_never_does_is_refused(prepared):
    config, inputs = prepared
    calm = dataclasses.replace(config, wire_dtype="fp32")
    (only,) = weigh(calm, inputs, CPU)
    found, told = judge(calm, [(only.wire, *only.worst)])
    assert found == calm and "takes" not in told
    with pytest.raises(ValueError, match="take a topology with fewer ranks") as error:
        judge(config, [("bf16", 1.4, "dq", "causal"), ("fp32", 1.2, "dk", "causal")])
    assert "dk under causal has 1.20 times one device's error with fp32 on the wire" in str(error.value)


def test_long_documents_are_cut_so_that_the_answer_is_cheap(prepared):
    config, inputs = prepared
    one = measure(config, inputs, micro_batch([3, 1]), "fp32", CPU)
    assert np.isfinite(one.ratios[:, [0, 2, 3, 4]]).all(), "more ranks than tokens"
    from hsap.train.budget import _cut

    assert _cut([100, 30], 8) == [100, 30]
    cut = _cut([100_000, 30, 2000], 8)
    assert cut[1] == 30 and cut[0] >= cut[2] > 500 and sum(n * n for n in cut) * 8 <= 1 << 24
