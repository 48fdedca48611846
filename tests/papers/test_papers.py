"""The papers' tables: published cells as printed, ratios and verdicts by hand, simulated times against arithmetic."""

import json
from collections import Counter

import pytest

from hsap.cli import main
from hsap.cli.bench import PAPER_TABLES
from hsap.ir.cluster import Cluster
from hsap.ir.problem import Topology
from hsap.papers import TABLES, comparison, hybrid, masks
from hsap.papers.comparison import Spread, Table, agreement, counted
from hsap.papers.pricing import priced, received_bytes, scaled_pack
from hsap.papers.published import published

CLUSTER = Cluster.preset("dgx-a100")


def test_tables_that_the_command_names_are_those_there_are() -> None:
    assert tuple(TABLES) == PAPER_TABLES


def test_published_tables_have_their_papers_shape() -> None:
    assert [(c["sp"], c["max_seq_len"] // 1024) for c in published("2").cells] == [
        (2, 8), (2, 16), (4, 16), (4, 32), (8, 32), (8, 64), (16, 64), (16, 128)
    ]  # fmt: skip
    three = published("3").cells
    assert Counter(c["gpus"] for c in three) == {8: 4, 16: 4, 64: 4}
    assert all((c["ulysses"] is None) == (c["gpus"] == 64) for c in three)
    # In the paper's bold type: HSAP is the fastest in every row.
    assert all(c["hsap"] < min(c["distflash"], c["ulysses"] or c["distflash"]) for c in three)
    four = published("4").cells
    assert len(four) == 3 * 4 * 3 and len({(c["context"], c["topology"], c["dataset"]) for c in four}) == 36
    assert all(list(c["tokens_per_s"]) == list(c["iter_per_s"]) == ["hsap", "packing", "batching"] for c in four)
    # Throughput per GPU of packs is iterations times context over eight GPUs, but for the table's rounding and slack.
    assert all(
        0.8 < c["tokens_per_s"]["packing"] * 8 / (c["iter_per_s"]["packing"] * c["context"]) < 1.25
        for c in four
        if c["dataset"] == "fineweb" and c["context"] < 65536
    )


def test_a_ratio_is_given_as_its_middle_and_its_range() -> None:
    spread = Spread.of([0.9, 0.5, 0.6])
    assert str(spread) == "0.60 (0.50 to 0.90)"
    assert spread.to_json() == {"middle": 0.6, "low": 0.5, "high": 0.9, "values": 3}
    assert str(Spread.of([2.0])) == "2.00"
    assert Spread.of([1.0, 3.0], middle=3.0).middle == 3.0


@pytest.mark.parametrize(
    "known, values, words",
    [
        (None, [0.5], "not published"),
        (0.7, [0.6, 0.9], "inside our range"),
        (0.7, [0.75], "near"),
        (0.5, [0.8], "same winner by less"),
        (0.8, [0.5], "same winner by more"),
        (0.5, [1.3], "other winner"),
        (0.5, [1.02], "ours is a tie"),
        (1.0, [2.0], "the paper's is a tie"),
        (2.45, [5.0], "same winner by more"),
    ],
)
def test_agreement_in_words(known, values, words) -> None:
    assert agreement(known, Spread.of(values)) == words


def test_verdicts_are_counted_most_frequent_first() -> None:
    assert counted([{"agreement": word} for word in ("near", "other winner", "near")]) == "2 near, 1 other winner"


def test_a_table_aligns_its_columns_and_wraps_its_notes() -> None:
    table = Table(
        "x", "Title", "source", ("a", "long"), (("1", "2"), ("333", "4")), ({"a": 1},), ("word " * 60,), ("f",)
    )
    lines = str(table).splitlines()
    assert lines[:2] == ["Title", "Published: source"]
    assert lines[3:7] == ["a    long", "---------", "1    2", "333  4"]
    assert max(map(len, lines)) <= comparison.WIDTH and lines[-1] == "Found: f"
    assert json.loads(json.dumps(table.to_json()))["figures"] == [{"a": 1}]


def test_one_document_takes_what_its_flops_say() -> None:
    """Ulysses at 128K on 8 GPUs is nearly all kernel: 4 and 10 operations a pair, head and dimension."""
    tokens = 131072
    timeline = priced([tokens], hybrid.HEADS, Topology(1, 8), CLUSTER, "sap")
    pairs = tokens * (tokens + 1) / 2 * 16 / 8
    by_hand = 128 * pairs * (4 / 0.65 + 10 / 0.55) / 312e12
    # Communication takes a part of the device only while bytes flow; all else adds little.
    assert by_hand < timeline.predicted_s < 1.08 * by_hand


def test_a_blind_distflash_receives_the_rows_that_its_schedule_says() -> None:
    """Two ranks: the second needs the first's KV, or the first its queries; forward and backward, in bf16."""
    timeline = priced([4096], hybrid.HEADS, Topology(2, 1), CLUSTER, "distflash")
    row = 16 * 128 * 2  # of q, or of o, in bytes
    stat = 16 * 4
    # Forward: q to the helper, o with its lse back. Backward: q, do with two statistics to the helper, dq back.
    assert received_bytes(timeline) == 2048 * (row + (row + row + 2 * stat))


def test_a_scaled_pack_holds_what_it_should() -> None:
    def draw(name: str, num_tokens: int, seed: int) -> list[int]:
        lengths = [1, 7, 100, 3] * num_tokens
        return lengths[: next(i for i in range(len(lengths)) if sum(lengths[:i]) >= num_tokens)]

    assert scaled_pack(draw, "any", 60, 0.5, 0) == [1, 3, 50, 1, 1, 3, 1]
    assert scaled_pack(draw, "any", 60, 4, 0) == [4, 28, 28]
    for scale in (0.3, 1, 2.5):
        assert sum(scaled_pack(draw, "any", 999, scale, 0)) == 999


def test_hybrid_packs_have_a_line_with_both_readings_of_distflash() -> None:
    cell = {"max_seq_len": 2048, "sp": 2, "distflash": 10.0, "sap": 4.0}
    figure = hybrid._hybrid(cell, CLUSTER, lambda kind, tokens, seed: [tokens // 2, tokens // 2], 1)
    assert figure["published"] == 0.4
    # No document spans two ranks: nothing to plan differently, nothing to send, half of the blind one's pairs.
    for reading in (hybrid.SKIPS, hybrid.BY_AREA):
        assert figure["readings"][reading]["ours"].low == pytest.approx(1.0)
        assert figure["readings"][reading]["ours"].high == pytest.approx(1.0)
    assert figure["readings"][hybrid.BLIND]["ours"].high < 1.0 and figure["blind_received_bytes"] > 0
    assert all(len(part["by_kind"]) == len(hybrid.KINDS) for part in figure["readings"].values())


def test_ulysses_needs_a_head_for_every_gpu() -> None:
    figure = hybrid._scaling(
        {"tokens_per_gpu": 64, "gpus": 64, "ulysses": None, "distflash": 2.0, "hsap": 1.0}, CLUSTER
    )
    assert figure["ours_s"]["ulysses"] is None and "16" in figure["refused"] and "head" in figure["refused"]
    assert figure["hsap_over"]["ulysses"] is None and figure["hsap_over"]["distflash"]["published"] == 0.5


def test_means_and_speed_ups_of_methods_by_hand() -> None:
    names = [*masks.METHODS]
    found = [
        dict.fromkeys(names, (1.0, 3.0)) | {"DCP": (1.0, 1.0), "LT": (2.0, 2.0), "TE": (1.0, 2.0)},
        dict.fromkeys(names, (2.0, 4.0)) | {"DCP": (0.5, 0.5), "LT": (1.0, 1.0), "TE": (1.0, 2.0)},
    ]
    figure, over = masks._causal(0.5, 2.45, found)
    assert figure["next_best"] == "TE" and figure["mean_s"]["TE"] == 3.0 and figure["mean_s"]["RFA ring"] == 5.0
    assert over["DCP"].values == (1.5, 3.0) and over["LT"].values == (2.0, 2.0)
    assert over["DCP"].middle == pytest.approx((3.0 + 3.0) / (2.0 + 1.0))
    assert figure["agreement"] == "inside our range"
    assert figure["directions_s"]["DCP"] == {"forward": 0.75, "backward": 0.75}


def test_words_about_two_ranks_follow_from_the_ratios() -> None:
    def said(ours: float, published: float) -> str:
        part = {"ours": Spread.of([ours])}
        return hybrid._two_ranks([{"readings": {hybrid.SKIPS: part}, "published": published}])

    assert "does the same there" in said(1.01, 0.6) and "skips less" in said(1.01, 0.6)
    assert said(1.0, 1.0).endswith("there it does the same, block for block")
    assert said(0.8, 0.6).endswith("published: 0.60")


def test_words_about_links_follow_from_the_rates() -> None:
    assert "nowhere slower" in hybrid._across_nodes([Spread.of([0.5, 1.0])])
    assert "at times slower" in hybrid._across_nodes([Spread.of([0.5, 0.9]), Spread.of([0.9, 1.2])])
    figure = {"sp": 16, "max_seq_len": 1024, "readings": {hybrid.BLIND: {"distflash_s": 0.5}}}
    figure |= {"published_distflash_ms": 2000.0, "blind_received_bytes": 4e9}
    assert "4 times ours" in hybrid._waited_for_links(figure, CLUSTER)
    assert "moved 2.00 GB/s, where our cluster's move 25 between nodes: such" in hybrid._waited_for_links(
        figure, CLUSTER
    )
    dear = hybrid._waited_for_links(figure | {"blind_received_bytes": 50e9}, CLUSTER)
    assert dear.endswith("moved 25.00 GB/s, where our cluster's move 25 between nodes")


def test_words_about_scaling_follow_from_the_times() -> None:
    def figure(hsap_ms: float, by_blocks_s: float, ulysses_ms: float | None) -> dict:
        known, ours = (
            {"hsap": hsap_ms, "ulysses": ulysses_ms},
            {"hsap": 1.0, "hsap by blocks": by_blocks_s, "distflash": 2.0},
        )
        over = {"distflash": {"published": 0.9, "ours": Spread.of([0.5]), "agreement": "near"}, "ulysses": None}
        conditions = {"tokens_per_gpu": 4096, "gpus": 64, "refused": "heads"}
        return conditions | {"published_ms": known, "ours_s": ours, "hsap_over": over}

    close, _, computing, blocks, refused = hybrid._scaling_findings([figure(1050.0, 2.2, None)])
    assert close == "HSAP over DistFlashAttn: 1 near" and "1.05 at 64 GPUs: that supports 16 heads" in computing
    assert "1.10 at 64 GPUs (published 0.90)" in blocks and "must have balanced" in blocks
    assert "on 64 GPUs" in refused and "prints out of memory" in refused
    _, _, computing, blocks, refused = hybrid._scaling_findings([figure(3000.0, 1.8, 5.0)])
    assert "others than we assume" in computing and "may have counted so" in blocks and "has a time there" in refused


def causal(scale: float, dcp: float, unpadded: float, relayed_s: float = 1.0, slowest: str = masks.LT_PADDED) -> dict:
    """A figure of DCP's 13: speed-ups, and times that say which baseline is slowest."""
    times = dict.fromkeys(masks.METHODS, 1.0) | {masks.RELAYED: relayed_s, slowest: 3.0}
    over = {masks.DCP: Spread.of([dcp])}
    figure = {"scale": scale, "mean_s": times, "next_best": masks.TE, "published": 2.45, "over_next_best": over}
    return figure | {"dcp_over_unpadded_lt": Spread.of([unpadded])}


def test_words_about_causal_masks_follow_from_the_speed_ups() -> None:
    trend, baselines, unpadded = masks._causal_findings([causal(0.5, 2.0, 1.5), causal(4, 1.0, 0.8, relayed_s=0.5)])
    assert "falls as" in trend and "multiplies LT's work" in baselines
    assert "where the paper has 2.45 over LT" in unpadded and "(with rows relayed so, DCP gains 2.00)" in unpadded
    figures = [causal(0.5, 1.0, 1.5, slowest=masks.RFA[0]), causal(4, 2.0, 1.2, slowest=masks.RFA[0])]
    trend, baselines, unpadded = masks._causal_findings(figures)
    assert "does not fall" in trend and baselines.endswith("the slowest is RFA ring, in the paper RFA")
    assert unpadded.endswith("with rows relayed DCP gains 1.00 there")


def test_words_about_sparse_masks_follow_from_the_speed_ups() -> None:
    def said(gains: tuple[float, ...]) -> tuple[str, ...]:
        return masks._sparse_findings(
            [
                {
                    "mask": mask,
                    "visible_pairs": i,
                    "mean_s": {masks.DCP: 2e-3},
                    "over_te": {masks.DCP: Spread.of([gain])},
                }
                for i, (mask, gain) in enumerate(zip(masks.SPARSE, gains))
            ],
            3.0,
        )

    _, least, above = said((5.0, 4.0, 2.0))
    assert (
        least == "the least sparse mask, shared question, gains least: as published" and "takes 2 ms or less" in above
    )
    (_, least) = said((1.0, 2.0, 2.5))
    assert least.endswith("not here, lambda does")


def test_the_least_sparse_mask_shows_most_pairs() -> None:
    shown = {mask: masks._visible_pairs([5000, 300], spelled) for mask, spelled in masks.SPARSE.items()}
    assert masks._visible_pairs([3, 2], "causal") == 9
    assert all(0 < pairs < 5000 * 5001 // 2 + 300 * 301 // 2 for pairs in shown.values())


def test_unknown_tables_and_too_few_packs_are_refused(capsys) -> None:
    assert main(["bench", "paper", "--table", "7"]) == 2
    assert "--table" in capsys.readouterr().err
    assert main(["bench", "paper", "--seeds", "0"]) == 2
    assert "--seeds" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_a_table(capsys) -> None:
    assert main(["bench", "paper", "--table", "3", "--seeds", "1", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["name"] == "3" and len(table["figures"]) == 12
