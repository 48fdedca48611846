"""Table 4 and Figure 5: padding by hand, the paper's topologies, and steps against what they must contain."""

import pytest
import yaml

from hsap.cli import main
from hsap.ir.cluster import Cluster
from hsap.ir.problem import Topology
from hsap.models.config import ModelConfig
from hsap.papers import scalability, training
from hsap.papers.comparison import Spread
from hsap.papers.training import MODEL, real_part
from tests.parity import REPOSITORY


def test_padding_by_hand() -> None:
    assert real_part([10, 30], 40) == 0.5
    assert real_part([1000], 40) == 1.0  # cut to the context
    assert real_part([40, 40, 10], 40) == 0.75


def test_the_paper_s_topologies_are_read_as_its_caption_has_them() -> None:
    assert training._topology("2x4") == Topology(inter_sp=4, intra_sp=2)
    assert training._topology("1x8") == Topology(8, 1)


@pytest.mark.parametrize("model, name", [(training.MODEL, "llama2-7b"), (scalability.MODEL, "gpt-30b")])
def test_models_are_those_of_the_configs(model, name) -> None:
    text = (REPOSITORY / "configs" / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    assert model == ModelConfig.from_mapping(yaml.safe_load(text))


def test_a_step_takes_longer_than_its_products_and_not_much() -> None:
    """Seven thousand million weights: 8 operations each and token, with forward done twice."""
    cluster, tokens = Cluster.preset(training.CLUSTER), 4096
    seconds = training._seconds([tokens], Topology(1, 8), cluster, "sap")
    products = 8 * MODEL.num_layers * MODEL.layer_matmul_params * tokens / 8 / (cluster.flops_per_s * 0.7)
    weights = 3 * 2 * MODEL.num_params / cluster.intra_bytes_per_s  # gathered twice, reduced once at double width: more
    assert products + weights < seconds < 4 * (products + weights)


def test_packs_of_known_documents_are_never_slower_than_blind_ones_here() -> None:
    cell = {
        "context": 8192,
        "topology": "4x2",
        "dataset": "fineweb",
        "tokens_per_s": {"hsap": 300.0, "packing": 200.0, "batching": 100.0},
    }
    cluster = Cluster.preset(training.CLUSTER)
    packing_s = training._seconds([8192], Topology(2, 4), cluster, "distflash")
    figure = training._cell(cell, cluster, lambda name, tokens, seed: [2048] * (tokens // 2048), 1, packing_s)
    assert figure["hsap_over_packing"]["published"] == 1.5 and figure["hsap_over_packing"]["ours"].low > 1
    assert figure["batching_over_packing"]["ours"].middle == 0.25


def test_words_about_batching_follow_from_the_ratios() -> None:
    def said(*figures: tuple[int, float, float]) -> str:
        return training._batching(
            [
                {
                    "context": context,
                    "dataset": "d",
                    "batching_over_packing": {"published": known, "ours": Spread.of([ours])},
                }
                for context, known, ours in figures
            ]
        )

    odd = said((16384, 1.0, 0.1), (65536, 0.05, 0.02))
    assert "batching has 1.00 times" in odd and "0.05 times it at 64K on d: no one way of padding" in odd
    assert said((16384, 0.3, 0.1), (65536, 0.05, 0.02)).endswith("0.05 times it at 64K on d")


def test_memory_grows_with_what_a_gpu_holds() -> None:
    cluster = Cluster.preset(scalability.CLUSTER, nodes=8)
    wide = [way for way in scalability._ways(scalability.HSAP, 1 << 16, cluster) if way.shape.startswith("dp 1, 8x8")]
    (ulysses, again) = scalability._ways(scalability.ULYSSES, 1 << 16, cluster)
    # An eighth of the tokens a GPU, the same states; attention's tensors are kept or not. The peak is where the first
    # gradients are reduced, when the last layer's own are gone.
    kept = 47 * 8192 * (4 * 7168 * 2 + 56 * 4)
    assert ulysses.needs_bytes - again.needs_bytes == pytest.approx(kept, rel=0.02)
    assert again.seconds > ulysses.seconds and max(way.needs_bytes for way in wide) < again.needs_bytes


def test_pipelines_keep_as_many_sequences_as_stages() -> None:
    cluster = Cluster.preset(scalability.CLUSTER, nodes=8)
    one, eight = (next(scalability._megatron(1 << 15, stages, cluster)) for stages in (1, 8))
    # Eight stages: 7 of 15 turns are a bubble, and the optimizer's states are not shared.
    assert eight.seconds > 1.5 * one.seconds
    states = [(6 + 12 / dp) * scalability.MODEL.num_params / ranks for dp, ranks in ((8, 8), (1, 64))]
    assert one.needs_bytes - eight.needs_bytes == pytest.approx(states[0] - states[1], rel=0.01)


def test_out_of_memory_is_told_with_the_least_that_is_needed() -> None:
    ways = [scalability.Way("a", 1.0, 80.0), scalability.Way("b, again", 2.0, 50.0)]
    assert scalability._best(ways, 1024, 40.0)[0] == {
        "tflops": None, "shape": "b, again", "needs_bytes": 50.0, "fits_kept": False
    }  # fmt: skip
    figure, _ = scalability._best(ways, 1024, 60.0)
    assert figure["shape"] == "b, again" and not figure["fits_kept"]
    flops = scalability.MODEL.train_flops(8 * 1024, 8 * 1024 * 1025 // 2)
    assert figure["tflops"] == pytest.approx(flops / 2.0 / 64 / 1e12)
    assert scalability._best(ways, 1024, 90.0)[0]["fits_kept"]


@pytest.mark.slow
def test_the_command_prints_the_figure(capsys) -> None:
    assert main(["bench", "paper", "--table", "5"]) == 0
    text = capsys.readouterr().out
    assert "OOM" in text and "512K" in text and "Megatron-like" in text
