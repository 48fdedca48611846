import logging
import os
import signal

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException

from hsap.train import loopback
from hsap.train.hang.shared import make
from hsap.train.processes import Leave, Start, Surroundings, Train, _run_agent, decide, rank_environment, start_ranks


@pytest.mark.parametrize(
    ("topology", "world_size", "dp"), [("4x2", 8, 1), ("2x1", 4, 2), ("3x5", 15, 1), (None, 6, 1), ("1x1", 1, 1)]
)
def test_ranks_that_fit_train_where_they_are(topology, world_size, dp):
    around = Surroundings(world_size=world_size, local_world_size=world_size)
    assert decide(topology, None, around) == Train("cpu", world_size)


@pytest.mark.parametrize("topology", ["4x2", "1x8", "7x3"])
def test_one_process_without_accelerators_starts_cpu_ranks(topology):
    inter_sp, intra_sp = map(int, topology.split("x"))
    assert decide(topology, None, Surroundings()) == Start("cpu", inter_sp * intra_sp)


def test_one_process_starts_as_many_accelerator_ranks_as_the_topology_takes():
    assert decide("2x2", None, Surroundings(accelerators=8)) == Start("cuda", 4)
    assert decide("4x2", None, Surroundings(accelerators=8)) == Start("cuda", 8)


def test_too_few_accelerators_is_an_error_that_names_the_way_out():
    for world_size, untold in [(1, 0), (4, 4)]:
        around = Surroundings(world_size=world_size, local_world_size=world_size, accelerators=4, untold_ranks=untold)
        with pytest.raises(ValueError, match=r"needs 8 ranks, but 4 accelerators") as error:
            decide("4x2", None, around)
        assert "engine.device=cpu" in str(error.value)
        assert "4x1, 2x2, 1x4" in str(error.value)


def test_device_cpu_forces_cpu_ranks_beside_accelerators():
    assert decide("4x2", "cpu", Surroundings(accelerators=4)) == Start("cpu", 8)
    assert decide("1x1", "cpu", Surroundings(accelerators=4)) == Train("cpu", 1)
    untold = {"world_size": 4, "local_world_size": 4, "accelerators": 4, "untold_ranks": 4}
    assert decide("4x2", "cpu", Surroundings(rank=0, **untold)) == Start("cpu", 8)
    assert decide("4x2", "cpu", Surroundings(rank=3, **untold)) == Leave("cpu", 8)


def test_ranks_that_deepspeed_started_one_a_numa_node_give_way():
    untold = {"world_size": 2, "local_world_size": 2, "untold_ranks": 2}
    assert decide("4x2", None, Surroundings(rank=0, **untold)) == Start("cpu", 8)
    assert decide("4x2", None, Surroundings(rank=1, **untold)) == Leave("cpu", 8)
    assert decide("2x1", None, Surroundings(rank=1, **untold)) == Train("cpu", 2)


@pytest.mark.parametrize("around", [Surroundings(world_size=3, local_world_size=3), Surroundings(started=True)])
def test_a_world_size_that_does_not_fit_says_what_would(around):
    with pytest.raises(ValueError, match=f"WORLD_SIZE={around.world_size} doesn't fit topology=2x2") as error:
        decide("2x2", None, around)
    assert "multiple of 4 (4, 8, 12, …)" in str(error.value)
    assert {3: "3x1, 1x3", 1: "1x1"}[around.world_size] in str(error.value)


def test_more_ranks_than_accelerators_is_an_error():
    with pytest.raises(ValueError, match=r"8 ranks were started on a machine with 4 .*engine\.device=cpu"):
        decide("8x1", None, Surroundings(world_size=8, local_world_size=8, accelerators=4))
    two_nodes = Surroundings(world_size=8, local_world_size=4, accelerators=4)
    assert decide("8x1", None, two_nodes) == Train("cuda", 8)


def test_device_cuda_without_one_is_an_error():
    with pytest.raises(ValueError, match="no CUDA device is visible"):
        decide("1x1", "cuda", Surroundings())


@pytest.mark.parametrize("topology", ["8", "4x", "x2", "0x2", "4x2x1", "-1x2", "4X2", " 4x2", "4x02", 8, True])
def test_a_malformed_topology_is_an_error(topology):
    with pytest.raises(ValueError, match="expected NxM"):
        decide(topology, None, Surroundings())


def test_started_ranks_inherit_nothing_of_the_launcher_above():
    above = {
        "PATH": "/bin",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "8",
    }
    assert rank_environment(above, "cpu", "outputs/x") == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "HSAP_STARTED": "1",
        "HSAP_OUT": "outputs/x",
    }
    assert rank_environment(above, "cuda", "outputs/x")["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(("ignored", "handled"), [(False, "SIGHUP,SIGQUIT"), (True, "SIGQUIT")])
def test_a_hangup_ends_ranks_with_one_line_and_under_nohup_not_at_all(monkeypatch, capsys, tmp_path, ignored, handled):
    def agent(arguments):
        assert f"--signals-to-handle={handled}" in arguments
        raise SignalException("got a signal", signal.SIGHUP)

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(run, "main", agent)
    monkeypatch.setattr(loopback, "keep_here", lambda: None)
    before = {n: signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background jobs begin with it ignored
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        # It was asked to end: that is no failure to start again from.
        assert start_ranks(Start("cpu", 2), "x.py", [], str(tmp_path), program="train.py", restarts=3) == 129
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
    assert "train.py: ended by SIGHUP" in capsys.readouterr().err


def test_a_hangup_between_two_attempts_is_none_of_the_agents(monkeypatch):
    def agent(arguments):
        signal.signal(signal.SIGHUP, lambda *_: None)
        signal.signal(signal.SIGQUIT, lambda *_: None)

    ends = (signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in ends]
    monkeypatch.setattr(run, "main", agent)
    try:
        assert _run_agent([], make(2), "train.py") == (0, True)
        assert [signal.getsignal(number) for number in ends] == before
    finally:
        for number, handler in zip(ends, before, strict=True):
            signal.signal(number, handler)
