"""What forked ranks need, imported once in the process that they are forked from."""

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"

# DeepSpeed imports these as it starts, and they take seconds.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

from hsap.train.inputs import check
from hsap.train.overrides import know_project
from hsap.train.run import run  # noqa: F401
from tests.parity import REPOSITORY
from tests.parity.rank import configure

know_project(REPOSITORY)
# The compiler's loops are loaded with the first plan.
check(configure(["out=never"], 1))
gc.freeze()
