"""Which choices there are, which fit, and how they are ranked and written down."""

from dataclasses import replace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hsap import clusters
from hsap.data.packing import deal, deal_all, deal_by_weight
from hsap.ir.check import Refused
from hsap.models import ModelConfig
from hsap.train.config import train_config
from hsap.train.overrides import know_project
from hsap.tune import table
from hsap.tune.choices import Refusals, shapes, too_large
from hsap.tune.experiment import chosen, overrides, write
from hsap.tune.job import Job, packs_per_step
from hsap.tune.room import Room
from hsap.tune.search import tune
from hsap.tune.setting import GIB
from hsap.tune.trials import Measured, override
from tests.bench.planning.cases import FOLDER

MODEL = ModelConfig(2048, 2, 128, 8, 4, 16, 352)
CONFIGS = FOLDER.parents[1] / "configs"


def job(
    nodes=2,
    ranks_per_node=4,
    cluster="cpu-gloo",
    lengths=(300, 900, 77, 1, 512) * 4,
    seq_len=1024,
    packs=4,
    model=MODEL,
    **more,
):
    cluster = clusters.read(cluster, nodes).starting_at(0, ranks_per_node)
    return Job("tiny", model, cluster, lengths, seq_len, packs, "fp32", **more)


def test_every_legal_shape_is_there_and_the_others_are_explained() -> None:
    refusals = Refusals()
    found = {str(shape) for shape in shapes(job(), refusals)}
    assert found == {
        *("4x2x1", "4x1x2"),
        *("2x4x1", "2x2x2", "2x1x4"),
        *("1x8x1", "1x4x2", "1x2x4"),
    }
    told = "\n".join(refusals.lines())
    assert "dp 8: every SP group needs a pack of its own" in told
    assert "intra 8: would send all-to-alls of every layer between nodes of 4" in told


def test_more_ranks_than_a_plan_may_have_go_into_data_parallelism() -> None:
    refusals, many = Refusals(), job(2048, 4, seq_len=1 << 20, packs=8192)
    assert max(shape.topology.num_ranks for shape in shapes(many, refusals)) == 4096
    assert "SP groups of 8192 ranks: plans are made for up to 4,096 ranks" in refusals.lines()
    assert "packs of 524,288 tokens would do" in Room(many).would_hold()


def test_more_intra_ranks_than_heads_are_illegal_and_odd_packs_don_t_go_round() -> None:
    refusals = Refusals()
    found = list(shapes(job(1, 16, packs=6), refusals))
    assert {shape.dp for shape in found} == {1, 2}
    told = "\n".join(refusals.lines())
    assert "intra 16: more ranks than the model's 8 query heads" in told
    assert "dp 4: the 6 packs of a step don't go round" in told
    refusals = Refusals()
    assert list(shapes(job(3, 4, packs=12), refusals)) and "start inside a node" in "\n".join(refusals.lines())
    assert not [s for s in shapes(job(1, 8, seq_len=4, packs=1), refusals) if s.dp == 1]
    assert "more ranks than a pack has tokens" in "\n".join(refusals.lines())


def test_micro_packs_divide_and_stop_where_ranks_are_busy() -> None:
    assert {s.micro_packs for s in shapes(job(), Refusals()) if s.dp == 1} == {1, 2, 4}
    long = job(1, 2, lengths=(40_000,), seq_len=32_768)
    assert {s.micro_packs for s in shapes(long, Refusals()) if s.dp == 1} == {1}


def test_all_groups_are_dealt_as_each_is() -> None:
    packs = job(packs=4).packs
    assert deal_all(packs, 2, 2) == [deal(packs, rank, 2, 2) for rank in range(2)]


@pytest.mark.parametrize(("dp", "micro"), [(1, 2), (3, 1), (2, 4), (4, 3)])
def test_packs_go_to_the_least_loaded_rank_with_room(dp, micro) -> None:
    weights = np.random.default_rng(dp).integers(0, 9, 24).tolist()
    loads, hands = [0] * dp, [[] for _ in range(dp)]
    for at, pack in enumerate(sorted(range(24), key=lambda pack: (-weights[pack], pack))):
        full = micro * (at // (dp * micro) + 1)
        rank = min((rank for rank in range(dp) if len(hands[rank]) < full), key=loads.__getitem__)
        hands[rank].append(pack)
        loads[rank] += weights[pack]
    assert deal_by_weight(weights, dp, micro).tolist() == np.reshape(hands, (dp, -1, micro)).tolist()


def test_packs_are_weighed_as_their_masks_show_them(monkeypatch) -> None:
    """Layers of two masks; and more tokens than a layout may hold are looked at in parts."""
    asked = job(lengths=(300, 5, 1, 700, 44) * 9, packs=9, model=replace(MODEL, masks="window:7*1+causal*1"))
    want = [
        sum(n * (n + 1) / 2 + sum(min(row + 1, 7) for row in range(n)) for n in (p.num_tokens for p in pack)) / 2
        for pack in asked.packs
    ]
    assert asked.loads.areas == pytest.approx(want)
    assert asked.loads.tokens.tolist() == [sum(p.num_tokens for p in pack) for pack in asked.packs]
    assert asked.loads.documents.tolist() == [len(pack) for pack in asked.packs]
    monkeypatch.setattr("hsap.tune.job.MAX_TOKENS", 1100)
    assert replace(asked).loads.areas == pytest.approx(want)


@pytest.fixture(scope="module")
def found():
    return tune(job(), ["sap", "usp"], 5)


def test_rows_are_ranked_and_fit(found) -> None:
    assert 1 <= len(found.rows) <= 5
    assert [row.step_s for row in found.rows] == sorted(row.step_s for row in found.rows)
    assert len({(row.setting.dp, row.setting.topology) for row in found.rows}) == len(found.rows)
    for row in found.rows:
        s = row.setting
        assert s.world == 8 and s.dp * s.micro_packs * s.accumulation == 4
        assert row.needs_bytes <= found.job.cluster.capacity_bytes
        assert row.tokens_per_s == pytest.approx(found.job.tokens / row.step_s)
        assert row.tflops == pytest.approx(found.job.flops / row.step_s / 8 / 1e12)
    assert sum(row.clock for row in found.rows) == min(3, len(found.rows))
    assert tune(job(), ["sap", "usp"], 5).rows == found.rows


def test_the_table_has_every_row_and_reason(found) -> None:
    trials = {0: Measured(123456.0), 1: Measured(None, "it fell over")}
    text = table.text(found, trials)
    assert "123,456" in text and "Not in the table:" in text
    assert f"{found.rows[1].setting.planner}: it fell over" in text.split("Trials that failed:")[1]
    told = [(row["measured_tokens_per_s"], row["trial_failed"]) for row in table.figures(found, trials)["rows"]]
    assert told == [(123456.0, None), (None, "it fell over"), *[(None, None)] * (len(found.rows) - 2)]
    assert text.count("GiB") >= 2 and f"{found.rows[0].setting.dp} x {found.rows[0].setting.topology}" in text
    figures = table.figures(found)
    assert len(figures["rows"]) == len(found.rows) and figures["rows"][0]["memory_bytes"]["weights"] > 0


def test_what_never_fits_is_refused_with_what_would() -> None:
    with pytest.raises(
        Refused, match=r"nothing that is legal fits 8 ranks.*needs .* GiB.*largest item is .* nodes would do"
    ):
        tune(job(seq_len=1 << 24, lengths=(1 << 24,), packs=1), ["sap"], 3)
    with pytest.raises(Refused, match="unknown name 'nobody'"):
        tune(job(), ["nobody"], 3)
    with pytest.raises(Refused, match="less than one pack"):
        packs_per_step(100, 101)
    with pytest.raises(ValueError, match="no token"):
        tune(job(lengths=()), ["sap"], 3)


def test_one_rank_needs_no_zero_and_no_choice_of_planner() -> None:
    (row,) = tune(job(1, 1), ["usp", "sap"], 3).rows
    assert (row.setting.zero_stage, row.setting.planner, row.setting.world) == (0, "sap", 1)


def composed(given) -> dict:
    know_project(CONFIGS.parent)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", given)
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("name", ["mine", "p4de"])
def test_a_cluster_of_one_s_own_goes_into_the_experiment(name, tmp_path) -> None:
    file = tmp_path / "own.yaml"
    mine = replace(
        clusters.read("p4de"), name=name, ranks_per_node=4, num_nics=3, inter_latency_s=1e-5, cores=4.0,
        rows_efficiency=((16, 0.5), (1024, 1.0)), comm_share=0.0, num_units=None,
    )  # fmt: skip
    clusters.write(mine, file, {}, "Mine.")
    asked = job(cluster=str(file))
    row = tune(asked, ["sap"], 1).rows[0]
    write(tmp_path, "tuned", asked, row)
    keys = {**chosen(asked), **{k: v for k, v in overrides(asked, row).items() if k.startswith("cluster.")}}
    for given in (
        [f"hydra.searchpath=[file://{tmp_path}]", "experiment=tuned"],
        [override(key, value) for key, value in keys.items()],
    ):
        assert train_config(composed(given), 8, "cpu", "outputs/x").cluster == clusters.read(str(file))


def test_what_is_short_is_said_however_little_it_is() -> None:
    items = {"weights": 30.0 * GIB, "reserve": 10.0 * GIB}
    assert "40.00 GiB a rank with 10.00 in reserve, 0.019 MiB more than it has" in too_large(items, 40 * GIB - 2e4)
    assert "0.50 GiB more than it has; the largest item is weights, 30.00 GiB" in too_large(items, 39.5 * GIB)


def test_rows_that_leave_little_are_marked(found) -> None:
    row, cluster = found.rows[0], found.job.cluster
    tight, roomy = (replace(cluster, capacity_bytes=row.needs_bytes * factor) for factor in (1.04, 1.06))
    assert [table.is_tight(c, row) for c in (tight, roomy)] == [True, False]
    assert "!" in "".join(table.cells(tight, row)) and "!" not in "".join(table.cells(roomy, row))
    device = clusters.read("dgx-a100")
    told = table.text(replace(found, job=replace(found.job, cluster=replace(device, num_nodes=1))))
    assert "8 ranks of 39.4 GiB, 4.0 of them a reserve" in told


def test_the_experiment_composes_to_the_row(found, tmp_path) -> None:
    row = found.rows[0]
    path = write(tmp_path, "tuned", found.job, row)
    assert path == tmp_path / "experiment" / "tuned.yaml"
    values = composed([f"hydra.searchpath=[file://{tmp_path}]", "experiment=tuned"])
    config = train_config(values, 8, "cpu", "outputs/x")
    assert config.cluster == clusters.read("cpu-gloo").starting_at(0, 4)
    s = row.setting
    assert (config.dp, config.topology, config.planner.name) == (s.dp, str(s.topology), s.planner)
    assert (config.engine.zero_stage, config.engine.dtype) == (s.zero_stage, "fp32")
    assert (config.train.micro_packs, config.accumulation) == (s.micro_packs, s.accumulation)
    assert config.data.pack_tokens == 1024 and config.arena_multiple == row.arena_multiple
    assert ModelConfig.from_mapping(config.model, 2048).checkpointing == s.checkpointing
    write(tmp_path, "tuned", found.job, row)  # its own file may be written again
    path.write_text("mine: 1\n", encoding="utf-8")
    for name, told in (("tuned", "wasn't written by hsap tune"), ("../x", "choose another")):
        with pytest.raises(Refused, match=told):
            write(tmp_path, name, found.job, row)
