"""Step time and FLOPs against arithmetic by hand and by brute force."""

from dataclasses import replace

import numpy as np
import pytest

from hsap.ir.problem import Cluster, Topology
from hsap.models import ModelConfig
from hsap.tune.collectives import gather_s, reduce_s
from hsap.tune.job import Job
from hsap.tune.setting import MATMUL_EFFICIENCY, Setting
from hsap.tune.step import MicroSteps, layer_s, micro_s, optimizer_s, step_s, traffic_s

MODEL = ModelConfig(50, 2, 48, 6, 2, 8, 80, masks="window:5+causal")
CLUSTER = Cluster("round", 4, 0, 1e9, 1e8, 1e-3, 2e-3, 1e9, 2, 1e9, 0.0)


def test_collectives_by_hand() -> None:
    # 8 ranks on 2 nodes: a rank lacks 7/8 of the bytes; a node lacks half, and has 4 cards.
    inside, between = 8e6 * 7 / 8 / 1e9, 8e6 / 2 / 4e8
    assert gather_s(8e6, CLUSTER, 8) == pytest.approx(max(inside, between) + 2e-3 + 3 * 1e-3)
    assert gather_s(8e6, CLUSTER, 4) == pytest.approx(8e6 * 3 / 4 / 1e9 + 3 * 1e-3)
    assert gather_s(8e6, CLUSTER, 1) == reduce_s(8e6, CLUSTER, 1) == 0
    assert reduce_s(8e6, CLUSTER, 8) == 2 * gather_s(8e6, CLUSTER, 8)
    # Two cards a node, and links that share their rate between both directions.
    shared = replace(CLUSTER, num_nics=2, duplex=1.0)
    assert gather_s(8e6, shared, 8) == pytest.approx(2 * max(inside, 2 * between) + 2e-3 + 3 * 1e-3)


def setting(zero: int, dp: int = 2, checkpointing: str = "none") -> Setting:
    return Setting(dp, Topology(2, 1), "sap", zero, checkpointing, 1, 2, "bf16")


def test_groups_meet_at_micro_steps_under_zero_2_and_at_the_step_s_end_under_zero_1() -> None:
    heavy = np.eye(2)
    groups = MicroSteps((10.0 * heavy, 20.0 * heavy), np.full((2, 2), 10))
    seconds = {zero: step_s(MODEL, setting(zero), CLUSTER, groups) for zero in (1, 2)}
    # One heavy micro-step has 2 layers of 30 s; under ZeRO 2 each micro-step waits for the group that has it.
    assert seconds[1] == pytest.approx(60, abs=5) and seconds[2] == pytest.approx(120, abs=5)


def test_recomputing_costs_a_forward_without_attention() -> None:
    micro = MicroSteps((1.0, 2.0), 100)
    full, none = (micro_s(MODEL, setting(1, checkpointing=c), CLUSTER, micro) for c in ("selective", "none"))
    assert full - none == pytest.approx(2 * layer_s(MODEL, "bf16", CLUSTER, 100))
    weights = 48 * (2 * 48 + 2 * 16 + 3 * 80)
    assert layer_s(MODEL, "bf16", CLUSTER, 100) > 2 * weights * 100 / (1e9 * MATMUL_EFFICIENCY)


def test_ranks_on_fewer_cores_take_longer_around_attention() -> None:
    micro, half = MicroSteps((1.0, 2.0), 100), replace(CLUSTER, cores=2.0)
    alone, crowded = (micro_s(MODEL, setting(1), cluster, micro) for cluster in (CLUSTER, half))
    assert crowded - 2 * 3 == pytest.approx(2 * (alone - 2 * 3))
    assert optimizer_s(MODEL, setting(1), half) == 2 * optimizer_s(MODEL, setting(1), CLUSTER)


def test_zero_s_traffic_is_counted_where_it_happens() -> None:
    gradients = reduce_s(4 * MODEL.num_params, CLUSTER, 4)
    weights = gather_s(2 * MODEL.num_params, CLUSTER, 4)
    assert traffic_s(MODEL, setting(0), CLUSTER) == (0, pytest.approx(gradients))
    assert traffic_s(MODEL, setting(1), CLUSTER) == (0, pytest.approx(gradients + weights))
    assert traffic_s(MODEL, setting(2), CLUSTER) == (pytest.approx(gradients), pytest.approx(weights))
    each, once = traffic_s(MODEL, setting(3), CLUSTER)
    assert once == 0 and each > gradients / 2 + 2 * 2 * (4 - 1) * 1e-3


def test_flops_by_brute_force() -> None:
    job = Job("m", MODEL, CLUSTER, (7, 12, 3), 10, 3, "bf16")
    weights = 2 * 48 * (2 * 48 + 2 * 16 + 3 * 80) + 50 * 48
    pieces = [piece.num_tokens for pack in job.packs for piece in pack]
    assert sum(pieces) == job.tokens and max(pieces) <= 10
    flops = 6 * weights * job.tokens
    for layer in range(2):
        for length in pieces:
            for q in range(length):
                seen = [k for k in range(q + 1) if layer == 1 or k > q - 5]
                # 2 products forward and 5 backward, of 2 operations per element of each of 6 heads of 8.
                flops += len(seen) * 6 * 8 * 2 * (2 + 5)
    assert job.flops == flops
