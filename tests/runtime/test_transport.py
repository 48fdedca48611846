"""What a round's messages become on torch's groups."""

import pytest
import torch
import torch.distributed as dist

from hsap.runtime.transport import Distributed


class Group:
    """A process group that only writes down what it is asked for."""

    def __init__(self):
        self.asked, self.waited = [], 0

    def recv(self, tensors, peer, tag):
        self.asked.append(("recv", peer, tag, *tensors))
        return self

    def send(self, tensors, peer, tag):
        self.asked.append(("send", peer, tag, *tensors))
        return self

    def wait(self):
        self.waited += 1


@pytest.fixture
def group(monkeypatch):
    made = Group()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6])
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    return made


def test_over_gloo_receives_are_posted_before_sends(group):
    """Or the word that we are ready waits behind our own message, and the link runs one way at a time."""
    transport, tensors = Distributed(group), [torch.zeros(n) for n in range(1, 6)]
    transport.launch(3, [(1, tensors[0]), (2, tensors[1]), (1, tensors[2])], [(1, tensors[3]), (1, tensors[4])])
    assert [kind for kind, *_ in group.asked] == ["recv"] * 2 + ["send"] * 3
    assert [len(asked[3]) for asked in group.asked] == [4, 5, 1, 2, 3]
    assert [asked[1] for asked in group.asked] == [1, 1, 1, 2, 1]
    assert transport.wait(3) and group.waited == 5


def test_messages_of_a_pair_match_by_tag_whichever_rounds_are_on_their_way(group):
    """The n-th message of a round to a peer has the tag of the n-th that the peer receives, and of no other round's."""
    transport, one = Distributed(group), torch.zeros(1)
    for round_ in (1, 2):
        transport.launch(round_, [(1, one), (1, one), (2, one)], [(2, one), (1, one), (1, one)])
    tags = {(kind, peer): [] for kind in ("send", "recv") for peer in (1, 2)}
    for kind, peer, tag, _ in group.asked:
        tags[kind, peer].append(tag)
    for peer, count in ((1, 4), (2, 2)):
        assert tags["send", peer] == tags["recv", peer] and len(set(tags["send", peer])) == count


def test_a_round_without_messages_is_done_at_once(group):
    transport = Distributed(group)
    transport.launch(0, [], [])
    assert transport.wait(0) and not group.asked


def test_over_nccl_a_round_is_one_batch_and_all_pairs_are_connected_first(group, monkeypatch):
    connected, batches = [], []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, peer, group: (kind, tensor, peer, group))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: batches.append(ops) or [group])
    monkeypatch.setattr("hsap.runtime.transport.connect", lambda *given: connected.append(given))
    transport, one, two = Distributed(group, "cuda:1"), torch.zeros(1), torch.zeros(2)
    assert connected == [(group, "cuda:1")] and not batches
    transport.launch(7, [(1, one), (2, two)], [(1, two)])
    # Peers as the whole job numbers them.
    assert batches == [[(dist.isend, one, 5, group), (dist.isend, two, 6, group), (dist.irecv, two, 5, group)]]
    assert transport.wait(7) and group.waited == 1
