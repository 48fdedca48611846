"""What NCCL is told of attention's communicator, with its class's place taken, as CPU builds have none."""

import types

import pytest
import torch.distributed as dist

from hsap.runtime.groups import nccl_options


class Options:
    """The fields that torch's stub of ProcessGroupNCCL names."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = types.SimpleNamespace(blocking=None, cga_cluster_size=None, min_ctas=None, max_ctas=None)


@pytest.mark.parametrize("max_ctas", [None, 4])
def test_thread_blocks_are_limited(monkeypatch: pytest.MonkeyPatch, max_ctas: int | None) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=Options), raising=False)
    options = nccl_options(max_ctas)
    assert options.is_high_priority_stream and options.config.max_ctas == max_ctas
    assert options.config.min_ctas is None and options.config.cga_cluster_size is None
