"""Ranks that HSAP starts on a machine are reached from that machine alone."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hsap.train.hang.beats import meet

ROOT = Path(__file__).resolve().parents[2]

RANK = """
import json, os, sys
import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
def open_at(pid):
    return [c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
rank = os.environ["RANK"]
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps([open_at(os.getpid()), open_at(os.getppid())]))
dist.barrier()
"""


def test_ranks_started_here_and_their_agent_listen_on_the_loopback_address_alone(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    program = "import sys; from hsap.train.processes import Start, start_ranks; _, script, out = sys.argv; " \
              "sys.exit(start_ranks(Start('cpu', 2), script, [out], out, program='train.py'))"  # fmt: skip
    arguments = [sys.executable, "-c", program, str(tmp_path / "rank.py"), str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        mine, agents = json.loads((tmp_path / f"{rank}.json").read_text())
        assert mine and agents and set(mine + agents) == {"127.0.0.1"}


STORES = """
    import datetime, importlib, socket, psutil
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    from hsap.train.loopback import keep_here
    keep_here()
    def store(host, port):
        return rendezvous._create_c10d_store(host, port, 0, 1, datetime.timedelta(seconds=60))
    def open_at(port):
        return [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port]
    first = store("127.0.0.1", 0)
    again = store("127.0.0.1", first.port)  # torch's own and ours share one, as in a rank
    again.set("a", b"b")
    assert first.get("a") == b"b" and open_at(first.port) == ["127.0.0.1"]
    named = store(socket.gethostbyname(socket.gethostname()) if {named} else "localhost", 0)
    assert open_at(named.port) == (["::"] if {named} else ["127.0.0.1"]), open_at(named.port)
"""


def test_stores_are_shared_and_others_are_left_to_torch():
    own = subprocess.run(["hostname", "-i"], capture_output=True, text=True, check=False).stdout.split()
    named = bool(own) and not own[0].startswith("127.") and ":" not in own[0]
    program = textwrap.dedent(STORES).replace("{named}", str(named))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ALONE = """
    import os, psutil, torch.distributed as dist
    from hsap.train.processes import be_alone
    be_alone()
    assert {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")} == {"RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    dist.barrier()
    open_at = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert {place.ip for place in open_at} == {"127.0.0.1"}, open_at
    assert int(os.environ["MASTER_PORT"]) in {place.port for place in open_at}
"""


def test_a_lone_rank_listens_on_the_loopback_address_alone():
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ALONE)], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_port_that_another_program_has_is_told(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=rf"rank 0 can't meet the others at 127.0.0.1:{port} \(.*--master_port"):
            meet(0, 2, 5.0)
