"""Namespaces: nodes emulated on this machine, with a network between them that is as slow as wanted.

Every node is a network namespace with one port on a bridge, which has a namespace of its own; both directions of a
port are shaped. Every node has cores of its own; where nodes are more than cores, some share one. Namespaces have no
names and the machine's own network gets nothing: a namespace lives as long as the process that holds it, and that
process as long as the pipe to the one that asked for it. So nothing is left behind, however the asking process ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from hsap.calibrate.measure import num_cores
from hsap.calibrate.processes import Inside

PORT = "node0"
"""A node's interface to the others, in its own namespace."""
_QUEUE_S = 0.05


@dataclass(frozen=True, slots=True)
class Nodes:
    """Emulated nodes. holders: processes that hold the nodes' namespaces, and last the bridge's."""

    num_nodes: int
    ranks_per_node: int
    bytes_per_s: float
    holders: tuple[int, ...]

    @property
    def inside(self) -> list[Inside]:
        """Where each rank lives, node after node, for `run_ranks`."""
        places = [
            Inside(_path(self.holders[i]), PORT, part_of_cores(i, self.num_nodes, sorted(os.sched_getaffinity(0))))
            for i in range(self.num_nodes)
        ]
        return [place for place in places for _ in range(self.ranks_per_node)]

    @property
    def cores(self) -> float:
        """A node's part of the machine's cores."""
        return max(num_cores() // self.num_nodes, 1) / max(-(-self.num_nodes // num_cores()), 1)

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return f"10.77.0.{node + 1}"

    def cut(self, node: int) -> None:
        """Pull the node's cable: what is on its way is lost, and no connection is told."""
        self._link(node, "down")

    def mend(self, node: int) -> None:
        """Plug it in again."""
        self._link(node, "up")

    def run(self, node: int, *command: str) -> str:
        """Run a command inside a node; gives what it prints. CalledProcessError where it fails."""
        return _in(self.holders[node], *command)

    def _link(self, node: int, state: str) -> None:
        _in(self.holders[-1], "ip", "link", "set", f"port{node}", state)


def part_of_cores(node: int, num_nodes: int, cores: Sequence[int]) -> tuple[int, ...]:
    """A node's cores: equally many for each node; where there aren't enough, one, which nodes share."""
    each = len(cores) // num_nodes
    return tuple(cores[node * each : (node + 1) * each]) or (cores[node % len(cores)],)


def refusal() -> str | None:
    """Why nodes can't be emulated here, as a paragraph; None where they can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    reasons = [f"there is no command {name}" for name in missing]
    if os.geteuid() != 0:
        reasons.append("this is not root")
    if not reasons:
        try:
            with nodes(2, 1, 125e6) as made:
                made.run(0, "true")
            return None
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            reasons.append(f"the kernel refused ({' '.join(said.split())})")
    return (
        f"nodes can't be emulated here: {', '.join(reasons)}. It takes root with the right to make network namespaces, "
        "veth pairs and bridges, and the commands ip and tc (package iproute2), unshare and nsenter (util-linux); in a "
        "container, start it with --cap-add=NET_ADMIN --cap-add=SYS_ADMIN."
    )


@contextmanager
def nodes(num_nodes: int, ranks_per_node: int, bytes_per_s: float = 125e6) -> Iterator[Nodes]:
    """Emulate nodes whose ports carry `bytes_per_s` each way; 125e6 is 1 Gb/s, Ethernet's and TCP's own bytes included.

    Ranks of a node share its port; among themselves they talk over the node's loopback, which isn't shaped.
    OSError, CalledProcessError: not allowed here (`refusal` says what is missing).
    """
    with ExitStack() as stack:
        holders = tuple(stack.enter_context(_namespace()) for _ in range(num_nodes + 1))
        *insides, switch = holders
        _in(switch, "ip", "link", "add", "bridge0", "type", "bridge")
        _in(switch, "ip", "link", "set", "bridge0", "up")
        made = Nodes(num_nodes, ranks_per_node, bytes_per_s, holders)
        for node, holder in enumerate(insides):
            end = ("peer", "name", f"port{node}", "netns", str(switch))
            _in(holder, "ip", "link", "add", PORT, "type", "veth", *end)
            _in(switch, "ip", "link", "set", f"port{node}", "master", "bridge0", "up")
            _in(holder, "ip", "address", "add", f"{made.address(node)}/24", "dev", PORT)
            for name in ("lo", PORT):
                _in(holder, "ip", "link", "set", name, "up")
            for where, name in ((holder, PORT), (switch, f"port{node}")):
                _in(where, *_shaping(name, bytes_per_s))
        yield made


def _shaping(interface: str, bytes_per_s: float) -> Sequence[str]:
    """A token bucket on what leaves an interface, just wide enough for veth's uncut segments of 64 KiB."""
    bits = f"{round(8 * bytes_per_s)}bit"
    burst = 72 * 1024
    limit = max(round(bytes_per_s * _QUEUE_S), 2 * burst)
    return (
        "tc",
        "qdisc",
        "add",
        "dev",
        interface,
        "root",
        "tbf",
        "rate",
        bits,
        "burst",
        str(burst),
        "limit",
        str(limit),
    )


@contextmanager
def _namespace() -> Iterator[int]:
    """Hold a fresh network namespace; gives the holder's process id. It reads a pipe, which ends when we do."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A Ctrl-C in the terminal is for us; the holder ends when we let go of it.
        start_new_session=True,
    ) as holder:
        try:
            if not holder.stdout.readline():
                raise PermissionError(holder.stderr.read().decode().strip())
            yield holder.pid
        finally:
            holder.stdin.close()
            holder.wait()


def _path(holder: int) -> str:
    return f"/proc/{holder}/ns/net"


def _in(holder: int, *command: str) -> str:
    """Run a command in a holder's network namespace."""
    done = subprocess.run(
        ["nsenter", f"--net={_path(holder)}", *command],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout
