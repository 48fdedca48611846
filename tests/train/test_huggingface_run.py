"""Training from a folder in Hugging Face's form under every ZeRO stage, and a folder made of a checkpoint."""

import json

import pytest
import torch

from hsap import cli
from hsap.models import ModelConfig, build_model
from hsap.models.huggingface import load, read_config, save
from hsap.train.overrides import rewrite
from tests.parity import REPOSITORY, write_data
from tests.train.forked import configure
from tests.train.worlds import World

pytestmark = pytest.mark.slow
CONFIG = ModelConfig(2048, 2, 48, 6, 2, 8, 64, attention_bias="all", qk_norm=True, masks="window:24+causal")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model whose norms and biases are no longer as `initialise` makes them, and data."""
    folder = tmp_path_factory.mktemp("huggingface")
    write_data(folder)
    model = build_model(CONFIG, seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    save(model, folder / "model", max_positions=192, like={"eos_token_id": 3}, shard_bytes=10**5)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / "model" / name).write_text("{}")
    return folder


def arguments(home, out, topology, stage, dtype="fp32", **more):
    settings = {
        "+topology": topology,
        "model.from": home / "model",
        "data.path": home / "ragged.jsonl",
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.pack_tokens": 192,
        "train.steps": 3,
        "train.packs_per_step": 2,
        "train.save_every": 3,
        "train.tensorboard": "false",
        "engine.zero_stage": stage,
        "engine.dtype": dtype,
        "engine.device": "cpu",
        "optim.warmup_steps": 0,
        "optim.lr": 1e-9,
        "out": home / out,
        **more,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def test_every_zero_stage_begins_from_the_folder(home):
    """At a learning rate near nothing the checkpoint of each is the folder, and the losses are one process's."""
    losses = {}
    for stage, topology, ranks in ((0, "1x1", 1), (1, "2x1", 2), (2, "1x2", 2), (3, "2x1", 2)):
        world = World(home, ranks, arguments(home, f"zero{stage}", topology, stage))
        assert "model.from" not in world.finish()
        lines = (home / f"zero{stage}" / "metrics.jsonl").read_text().splitlines()
        losses[stage] = [json.loads(line)["loss"] for line in lines]
        target = home / f"exported{stage}"
        assert cli.main(["export", str(home / f"zero{stage}"), "-o", str(target), "--like", str(home / "model")]) == 0
        assert read_config(target)[0] == CONFIG and read_config(target)[1]["eos_token_id"] == 3
        for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (target / name).is_file()
        after = dict(load(target).named_parameters())
        for name, parameter in load(home / "model").named_parameters():
            torch.testing.assert_close(after[name], parameter, rtol=0, atol=1e-7)
    for stage in (1, 2, 3):
        assert losses[stage] == pytest.approx(losses[0], rel=1e-5)


def test_an_exported_run_goes_on_elsewhere(home, capsys):
    """A checkpoint of trained weights, exported bit for bit, is what another run begins from."""
    World(home, 2, arguments(home, "far", "2x1", 3, **{"optim.lr": 1e-2})).finish()
    checkpoint = home / "far" / "checkpoints" / "step3"
    assert cli.main(["export", str(checkpoint), "-o", str(home / "fp32")]) == 0
    assert (
        cli.main(["export", str(checkpoint), "-o", str(home / "bf16"), "--dtype", "bf16", "--max-positions", "9"]) == 0
    )
    assert "step 3, bf16" in capsys.readouterr().out
    assert read_config(home / "fp32")[1]["max_position_embeddings"] == 192
    assert read_config(home / "bf16")[1]["max_position_embeddings"] == 9
    whole, half = (dict(load(home / name).named_parameters()) for name in ("fp32", "bf16"))
    before = dict(load(home / "model").named_parameters())
    for name, parameter in whole.items():
        assert torch.equal(parameter.bfloat16().float(), half[name]) and not torch.equal(parameter, before[name])


def test_what_can_not_be_exported_is_said(home, capsys, tmp_path):
    assert cli.main(["export", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert "hsap.json can't be read" in capsys.readouterr().err


def test_a_folder_that_does_not_fit_is_refused_before_ranks_start(home):
    from hsap.train.inputs import check

    for more, told in (
        ({"model.num_layers": 3}, r"model\.num_layers=3, but 2 in"),
        ({"model.from": home}, r"config\.json isn't there"),
        ({"model.checkpointing": "maybe"}, r"model\.checkpointing"),
    ):
        with pytest.raises(ValueError, match=told):
            check(configure(arguments(home, "no", "1x1", 0, **more), 1))


def test_a_folder_brings_its_own_group():
    assert "model=huggingface" in rewrite(["model.from=x"]) and "model=huggingface" in rewrite(["++model.from=x"])
    assert rewrite(["model.from=x", "model=tiny"]).count("model=tiny") == 1
    assert "model=huggingface" not in rewrite(["model.from=x", "model=tiny"])
    assert rewrite(rewrite(["model.from=x"])) == rewrite(["model.from=x"])
