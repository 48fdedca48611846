"""Llama, Qwen2 and Mistral of transformers under DeepSpeed and FSDP2 on four ranks beside one process."""

from pathlib import Path

import pytest

from tests.train.worlds import World, script

pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed here")


@pytest.mark.slow
def test_four_ranks_train_as_stock_models_do_in_one_process(tmp_path):
    out = World(tmp_path, 4, [str(Path(__file__).with_name("transformers_rank.py"))], script).finish(limit_s=1800)
    told = [line for line in out.splitlines() if "loss off by" in line]
    assert len(told) == 16, out[-2000:]
