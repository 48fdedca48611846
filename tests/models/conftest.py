"""What tests of models share."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A job of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
