"""Runs with something wrong at one step: who is named, what is left as it was, and that a dump computes it again."""

import json
import math
import shutil
import socket

import pytest

from hsap.cli import main as hsap
from hsap.train.guard.dump import read_dump
from hsap.train.guard.replay import Replayer, repeats
from tests.parity import REPOSITORY
from tests.train import guard_rank
from tests.train.guard_rank import BAD_STEP, BAD_TOKEN
from tests.train.worlds import fork

pytestmark = pytest.mark.slow

RANKS = 2
MODEL = {
    "model.num_layers": 2, "model.hidden_dim": 32, "model.head_dim": 8, "model.ffn_dim": 48, "model.num_q_heads": 4,
    "model.num_kv_heads": 2, "model.vocab_size": 2048, "model.tied_embeddings": "false",
}  # fmt: skip
LENGTHS = [40, 1, 90, 33, 61, 20, 96, 7]
SKIPPED = [(0, "fp32"), (1, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
DIVERGED = ("tokens", "labels", "documents", "plan", "settings", "weights")


def arguments(folder, name, *more):
    settings = {
        "topology": "2x1", "data.path": folder / "documents.jsonl", "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json", "data.cache": folder / "cache",
        "data.pack_tokens": 96, "train.steps": 4, "train.packs_per_step": 4, "train.micro_packs": 2,
        "train.tensorboard": "false", "engine.device": "cpu", "optim.warmup_steps": 2, "out": folder / name, **MODEL,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in settings.items()] + list(more)


def cases(folder):
    made = {
        f"skip-{stage}-{dtype}": (
            "output",
            ("guard.non_finite=skip", f"engine.zero_stage={stage}", f"engine.dtype={dtype}"),
        )
        for stage, dtype in SKIPPED
    }
    made |= {
        "layer": ("output", ("engine.zero_stage=1",)),
        "embedding": ("embedding", ("guard.non_finite=dump", "engine.zero_stage=0")),
        "gradient": ("gradient", ("engine.zero_stage=2",)),
        "leap": (
            "weights turned",
            (
                "guard.spike=1e-6",
                "guard.spike_window=8",
                "guard.on_spike=dump",
                "engine.zero_stage=3",
                "train.steps=7",
            ),
        ),
        "many": ("embedding", ("guard.non_finite=skip", "guard.max_skips=1", "engine.zero_stage=0")),
        "tsp": ("loss", ("guard.non_finite=skip", "parallel=tsp", "planner=zigzag")),
        "budget": (
            "nothing",
            ("check.error_budget=1.01", "engine.dtype=bf16", "wire_dtype=bf16", "planner=zigzag", "train.steps=1"),
        ),
        "cursor": ("cursor", ("topology=1x1", "train.micro_packs=1")),
    }
    made |= {name: (name, ()) for name in DIVERGED}
    return {name: (wrong, arguments(folder, name, *more)) for name, (wrong, more) in made.items()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What both ranks say of every case, and the folder; token `BAD_TOKEN` is in document d3 alone."""
    folder = tmp_path_factory.mktemp("guard")
    with (folder / "documents.jsonl").open("w") as file:
        for i, length in enumerate(LENGTHS):
            tokens = [2 + (37 * i + 11 * j) % 500 for j in range(length)]
            if i == 3:
                tokens[10] = BAD_TOKEN
            file.write(json.dumps({"id": f"d{i}", "tokens": tokens}) + "\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [fork(guard_rank.main, rank, RANKS, port, cases(folder), str(folder)) for rank in range(RANKS)]
    for rank in ranks:
        rank.join(900)
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert not any("world" in one for one in said), said[0].get("world") or said[1]["world"]
    return said, folder


def told(ended, case):
    """What both ranks raised, the same on both."""
    one, other = (said[case] for said in ended[0])
    assert "trace" not in one and "trace" not in other, one.get("trace", other.get("trace"))
    assert one["error"] == other["error"]
    return one["error"]


def steps(folder, case):
    return [json.loads(line) for line in (folder / case / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("stage", "dtype"), SKIPPED)
def test_a_step_left_out_changes_no_bit(ended, stage, dtype):
    said, folder = ended
    case = f"skip-{stage}-{dtype}"
    for one in said:
        assert one[case].keys() == {"notes"}, one[case]
        assert one[case]["notes"]["unchanged"] and one[case]["notes"]["tensors"] > 20
    figures = steps(folder, case)
    assert [one["step"] for one in figures] == [1, 2, 3, 4]
    assert [one["skipped_steps"] for one in figures] == [0, 0, 1, 1]
    bad = figures[BAD_STEP - 1]
    assert bad["left_out"] == "non_finite" and bad["loss"] is None and bad["grad_norm"] is None
    assert all("left_out" not in one and math.isfinite(one["loss"]) for one in figures if one is not bad)


def test_a_bad_embedding_is_traced_to_its_document(ended):
    error = told(ended, "embedding")
    assert error.startswith(f"step {BAD_STEP}: the loss is nan and the gradient's norm is nan; ")
    assert "32 elements of model.embed_tokens.weight weren't finite before this step" in error
    assert "the first output that isn't finite is that of model.embed_tokens on rank" in error
    assert f"which has id {BAD_TOKEN} and is token 10 of its document; documents 'd3'" in error
    assert "the loss isn't finite of 'd3' (micro-batch" in error


def test_a_bad_layer_is_named_with_its_rank(ended):
    """The output is poisoned on rank 1 alone, and every document that has rows there is bad."""
    error = told(ended, "layer")
    assert "the first output that isn't finite is that of model.layers.1.mlp (layer 1) on rank 1, in" in error
    assert "Lower optim.lr" in error and "weren't finite before" not in error


def test_a_gradient_alone_that_is_not_finite_is_traced_backward(ended):
    error = told(ended, "gradient")
    assert error.startswith(f"step {BAD_STEP}: the gradient's norm is ")
    assert (
        "the first gradient of an output, going backward, that isn't finite is that of model.embed_tokens on rank "
        in error
    )


def test_too_many_steps_left_out_in_a_row_end_the_run(ended):
    error = told(ended, "many")
    assert "step 4: " in error and "and so was 1 step before it" in error and "guard.max_skips=1" in error


def test_a_step_left_out_changes_no_bit_where_weights_are_sharded_with_tokens(ended):
    said, folder = ended
    for one in said:
        assert one["tsp"]["notes"]["unchanged"] and one["tsp"]["notes"]["tensors"] > 20, one["tsp"]
    assert [one["skipped_steps"] for one in steps(folder, "tsp")] == [0, 0, 1, 1]


def test_a_dump_computes_the_same_loss_and_names_the_same_document(ended):
    _, folder = ended
    for case in ("leap", "embedding"):
        (path,) = (folder / case / "dumps").iterdir()
        assert f"hsap replay {path}" in told(ended, case)
        dump = read_dump(path)
        replay = Replayer(dump).replay(most_alone=20)
        assert repeats(dump, replay)
        seen = [loss for one in dump.micros for loss in one.losses]
        for one, loss in zip(replay.documents, seen, strict=True):
            assert one.loss_sum == pytest.approx(loss, rel=1e-6, nan_ok=True), one
            alone = replay.alone[one.group, one.micro, one.index]
            assert alone.loss_sum == pytest.approx(loss, rel=1e-6, nan_ok=True), one
        if case == "leap":
            assert replay.loss == pytest.approx(dump.seen["loss"], rel=1e-6)
            assert replay.grad_norm == pytest.approx(dump.seen["grad_norm"], rel=1e-5)
            wide = Replayer(dump, "fp64").replay(most_alone=0)
            assert wide.loss == pytest.approx(dump.seen["loss"], rel=1e-6)
        else:
            assert [one.name for one in replay.documents if math.isnan(one.loss_sum)] == ["d3"]
            assert replay.first["module"] == "model.embed_tokens" and replay.first["documents"] == ["d3"]
            assert replay.gradients


def test_the_command_replays_and_refuses_what_is_damaged(ended, tmp_path, capsys):
    _, folder = ended
    (path,) = (folder / "leap" / "dumps").iterdir()
    assert hsap(["replay", str(path), "--documents", "2", "--planner", "zigzag"]) == 0
    out = capsys.readouterr().out
    assert "what training saw is seen again in fp32" in out and "documents more" in out
    assert out.count(f"step {path.name.removeprefix('step')}: ") == 1
    for name, content, said in (
        ("rank1.safetensors", b"\0", "is damaged"),
        ("dump.json", b"{}", "is no dump of this version"),
        ("group0-micro1.plan", None, "is missing"),
    ):
        copy = tmp_path / name
        shutil.copytree(path, copy)
        if content is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(content)
        assert hsap(["replay", str(copy)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("hsap replay: ") and name in line and said in line
    # Whoever edits a dump and its checksum as well is told what doesn't fit.
    assert hsap(["replay", str(folder)]) == 2
    assert "can't be read" in capsys.readouterr().err


@pytest.mark.parametrize("case", ("tokens", "labels"))
def test_another_batch_on_one_rank_ends_all_with_both_sides(ended, case):
    error = told(ended, case)
    assert error.startswith(f"step {BAD_STEP}: the ranks of SP group 0 don't hold the same: batch ")
    assert " on rank 0; batch " in error and " on rank 1. " in error
    assert f"The first difference: micro-batch 1, {case}, row 5 of " in error


def test_other_documents_and_another_plan_are_named(ended):
    assert "micro-batch 1, document_ids, number 0 of " in (error := told(ended, "documents"))
    assert "'?' on rank 1" in error
    error = told(ended, "plan")
    assert "micro-batch 1, line 2 of the plan's text: 'planner \"sap\"" in error and " on rank 0, " in error
    assert '\'planner "ring"' in error and " on rank 1. " in error


def test_ranks_started_unlike_are_told_before_the_first_step(ended):
    _, folder = ended
    assert "optim.lr is " in (error := told(ended, "settings")) and "0.5 on rank 1" in error
    assert "1 of " in (error := told(ended, "weights")) and "the first is model.norm.weight" in error
    assert not (folder / "settings" / "metrics.jsonl").exists()


def test_sp_groups_at_another_place_of_the_data_end_together(ended):
    error = told(ended, "cursor")
    assert f"step {BAD_STEP}: the ranks of the job aren't at the same place of the data: " in error
    assert "epoch is 2 on rank 0; 7 on rank 1" in error


def test_a_wire_over_the_budget_is_widened_on_all_ranks(ended):
    said, folder = ended
    assert all(one["budget"].keys() == {"notes"} for one in said), said[0]["budget"]
    assert [one["wire_dtype"] for one in steps(folder, "budget")] == ["fp32"]
    assert "wire_dtype" not in steps(folder, "tsp")[0]
