"""The guard's judgement by hand-made figures, what of its settings is refused, and checksums that ranks compare."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hsap.cli.replay import loss_column
from hsap.train.agreement import batch_digest, content, equal, plans_digest
from hsap.train.groups import GuardConfig
from hsap.train.guard.judge import Judge
from hsap.train.guard.outputs import Outputs
from hsap.train.overrides import know_project
from tests.parity import REPOSITORY
from tests.parity.rank import configure
from tests.train.batches import micro_batch

WINDOW = [1.9, 2.1] * 4
"""Median 2.0, ninth decile 2.1: a deviation is 0.1 / 1.2816."""


know_project(REPOSITORY)


def judge(**settings):
    return Judge(GuardConfig(**{"spike_window": 8, **settings}))


def test_what_is_not_finite_is_told_whatever_it_is():
    for loss, norm, told in (
        (math.nan, 1.0, "the loss is nan"),
        (2.0, math.inf, "the gradient's norm is inf"),
        (-math.inf, math.nan, "the loss is -inf and the gradient's norm is nan"),
    ):
        trouble = judge(non_finite="dump").judge(loss, norm)
        assert (trouble.kind, trouble.told, trouble.action) == ("non_finite", told, "dump")
    assert judge().judge(1e30, 0.0) is None


def test_a_loss_leaps_beyond_so_many_robust_deviations():
    threshold = 2.0 + 6 * 0.1 / 1.2815515655446004
    for loss, leaps in ((threshold - 1e-6, False), (threshold + 1e-6, True), (0.1, False)):
        guard = judge(spike=6.0, on_spike="skip")
        assert all(guard.judge(one, 1.0) is None for one in WINDOW)
        trouble = guard.judge(loss, 1.0)
        assert (trouble is not None) is leaps
    assert "the loss leaps to 2.4682, 6.0 deviations above 2, the median of the last 8 steps" in trouble_of(threshold)


def trouble_of(threshold):
    guard = judge(spike=6.0)
    for one in WINDOW:
        guard.judge(one, 1.0)
    return guard.judge(threshold + 1e-5, 1.0).told


def test_a_norm_leaps_by_its_logarithm_and_never_for_less_than_a_twentieth():
    for norm, leaps in ((math.exp(0.3) - 1e-6, False), (math.exp(0.3) + 1e-6, True)):
        guard = judge(spike=6.0)
        assert all(guard.judge(2.0, 1.0) is None for _ in range(8))
        assert (guard.judge(2.0, norm) is not None) is leaps


def test_a_loss_of_nothing_leaps_by_more_than_nothing():
    for loss, leaps in ((0.0, False), (5e-4, False), (7e-4, True)):
        guard = judge(spike=6.0)
        assert all(guard.judge(0.0, 1e-9) is None for _ in range(8))
        assert (guard.judge(loss, 1e-9) is not None) is leaps


def test_a_loss_leaps_beside_a_norm_of_nothing_and_steps_without_targets_do_not():
    guard = judge(spike=6.0)
    assert all(guard.judge(one, 1.0) is None for one in WINDOW)
    assert "the loss leaps to 9" in guard.judge(9.0, 0.0).told
    fresh = judge(spike=6.0)
    assert all(fresh.judge(one, norm) is None for one in WINDOW for norm in (0.0, 1.0))
    assert fresh.judge(0.0, 0.0) is None


def test_figures_that_no_run_writes_are_passed_over():
    odd = [{"loss": "2", "grad_norm": 1.0}, {"loss": 2.0, "grad_norm": {}}, {"loss": math.nan, "grad_norm": 1.0},
           {"loss": True, "grad_norm": 1.0}, {"loss": 10**400, "grad_norm": 1.0}, {"skipped_steps": "3"}]  # fmt: skip
    again = Judge(GuardConfig(spike=6.0, spike_window=8), odd + [{"loss": one, "grad_norm": 1.0} for one in WINDOW])
    assert again.skipped == 0 and again.judge(9.0, 1.0).kind == "spike"


def test_nothing_leaps_before_half_of_the_window_is_there_nor_without_the_setting():
    guard = judge(spike=6.0)
    assert [guard.judge(loss, 1.0) is None for loss in (2.0, 2.0, 2.0, 90.0)] == [True] * 4
    assert guard.judge(900.0, 1.0) is not None
    guard = judge()
    assert all(guard.judge(loss, 1.0) is None for loss in (*WINDOW, 1e9))


def test_what_was_left_out_is_counted_stays_out_of_the_window_and_has_a_limit():
    guard = judge(spike=6.0, on_spike="skip", max_skips=2)
    for one in WINDOW:
        guard.judge(one, 1.0)
    assert [guard.judge(9.0, 1.0).action for _ in range(2)] == ["skip", "skip"]
    assert guard.judge(2.0, 1.0) is None
    assert [guard.judge(9.0, 1.0).action for _ in range(3)] == ["skip", "skip", "stop"]
    assert guard.skipped == 5
    warned = judge(spike=6.0)
    for one in (*WINDOW, *[9.0] * 8):
        warned.judge(one, 1.0)
    assert warned.judge(9.1, 1.0) is None, "a level that stays is no leap"


def test_a_run_that_goes_on_judges_as_the_unbroken_one():
    guard, past = judge(spike=6.0, on_spike="skip", max_skips=1), []
    for loss in (*WINDOW, 9.0, 2.0, 9.0):
        trouble = guard.judge(loss, 1.0)
        figures = {"loss": loss, "grad_norm": 1.0, "skipped_steps": guard.skipped}
        past.append(figures if trouble is None else figures | {"left_out": "spike"})
    again = Judge(guard.config, past)
    assert again.skipped == guard.skipped == 2 and again.in_a_row == 1
    assert [one.judge(9.0, 1.0).action for one in (guard, again)] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["guard.on_spike=skip"], "guard.on_spike=skip with guard.spike=null does nothing"),
        (["guard.non_finite=ignore"], "guard.non_finite=ignore: expected one of stop, skip, dump"),
        (["guard.spike=0"], "guard.spike=0: expected a number above 0"),
        (["guard.max_skips=0"], "guard.max_skips=0: expected a whole number of at least 1"),
        (["guard.spike_window=2"], "guard.spike_window=2: expected a whole number of at least 8"),
        (["check.error_budget=0.9"], "check.error_budget=0.9: expected a number of at least 1"),
        (["guard.non_finite=dump", "parallel=tsp", "topology=2x1"], "can't be replayed; set stop or skip there"),
    ],
)
def test_settings_that_do_nothing_are_refused(arguments, told):
    with pytest.raises(ValueError) as error:
        configure(["out=never", *arguments], 2)
    assert told in str(error.value)


def test_a_configuration_of_before_has_no_guard_and_is_guarded():
    assert configure(["out=never", "~guard", "~check"], 1).guard == GuardConfig()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64, torch.uint8))
def test_every_bit_and_every_place_counts_in_a_checksum(dtype):
    tensor = torch.arange(3000).to(dtype)
    mine = content(tensor)
    assert mine == content(tensor.clone().view(50, 60)) and 0 <= mine < 1 << 64
    for place in (0, 1, 2999):
        for bit in range(8 * tensor.element_size()):
            changed = tensor.clone()
            changed.view(torch.uint8)[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8
            assert content(changed) != mine
    swapped = tensor.clone()
    swapped[[3, 7]] = tensor[[7, 3]]
    assert content(swapped) != mine
    assert content(tensor[:0]) != content(torch.zeros(1, dtype=dtype))


def test_equal_numbers_are_told_from_others_by_their_sums():
    for numbers in ([5, 5, 5], [0, 0], [(1 << 24) - 1] * 4096):
        assert equal(len(numbers), sum(numbers), sum(n * n for n in numbers))
    for numbers in ([5, 5, 6], [0, 1], [4, 6, 5], [(1 << 24) - 1] * 4095 + [(1 << 24) - 2]):
        assert not equal(len(numbers), sum(numbers), sum(n * n for n in numbers))


def test_all_of_a_batch_enters_its_digest():
    one = micro_batch([5, 3])
    digests = {batch_digest([one]), batch_digest([one, one]), batch_digest([])}
    for name in ("tokens", "labels", "positions"):
        array = getattr(one, name).copy()
        array[4] ^= 1
        digests.add(batch_digest([micro_batch([5, 3], **{name: array})]))
    digests.add(batch_digest([micro_batch([5, 3], document_ids=("a", "c"))]))
    assert len(digests) == 7 and batch_digest([micro_batch([5, 3])]) == batch_digest([one])


def test_all_plans_and_their_order_enter_their_digest():
    one, other = (SimpleNamespace(hash=letter * 64) for letter in "ab")
    late = SimpleNamespace(hash="a" * 63 + "b")
    digests = {plans_digest(plans) for plans in ([], [one], [late], [one, one], [one, other], [other, one])}
    assert len(digests) == 6 and plans_digest(iter([one])) == plans_digest([one])


def test_the_first_output_that_is_not_finite_is_seen_with_its_rows():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    x = torch.ones(5, 2)
    x[3] = math.inf
    x[1, 0] = math.nan
    with Outputs(model) as outputs:
        model(x)
    assert (outputs.first.module, outputs.first.order, outputs.first.layer) == ("0", 0, None)
    assert outputs.first.rows.tolist() == [1, 3]
    with Outputs(model) as outputs:
        model(torch.ones(5, 2))
    assert outputs.first is None and not model[0]._forward_hooks
    assert np.isfinite(model(torch.ones(1, 2)).detach().numpy()).all()


@pytest.mark.parametrize(
    ("loss", "told"),
    [(2.5, "2.500000"), (-0.1, "-0.100000"), (99999.0, "99999.000000"), (3.86e35, "3.86e+35"), (math.nan, "nan")],
)
def test_a_loss_out_of_all_bounds_keeps_its_column(loss, told):
    assert loss_column(loss) == told
