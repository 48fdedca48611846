"""Training takes a prepared folder like the data that it was made of, and refuses one that was made otherwise."""

import dataclasses

import pytest

from hsap.data import prepared
from hsap.data.loader import StepLoader
from hsap.train.inputs import check, read_inputs
from tests.train.test_inputs import configuration

ROWS = [
    *({"text": f"Document {i} about {i % 5} whales."} for i in range(30)),
    {"text": ""},
    {"prompt": "Who?", "answers": ["Ishmael.", "Queequeg."]},
    # Longer than every pack: left out by all of them, but for both kinds of data it has its place in the order.
    {"prompt": "Who?", "answers": ["Ishmael. " * 400, "Queequeg."]},
    {"text": "The end."},
]
CHATS = "data.chat_template=chatml"


@pytest.fixture
def folder(tmp_path):
    config = configuration(tmp_path, CHATS, rows=ROWS)
    prepared.prepare(config.data, tmp_path / "prepared", shard_tokens=100)
    return tmp_path / "prepared"


def test_a_prepared_folder_trains_the_same_steps(folder, tmp_path):
    plain, stored = (
        read_inputs(configuration(tmp_path, CHATS, *more, rows=ROWS))
        for more in ([], [f"data.path={folder}", f"data.eval_path={folder}", "train.eval_every=1"])
    )
    assert stored.left_out[0] == plain.left_out[0] and "1 left out" in plain.left_out[0]
    assert stored.identity["data.path"] == prepared.read_index(folder).content
    assert stored.eval_data is not None
    packing = configuration(tmp_path, CHATS, rows=ROWS).packing
    loaders = [StepLoader(one.train_data, packing, packs_per_step=2, lookahead=0) for one in (plain, stored)]
    for _ in range(20):
        steps = [next(loader) for loader in loaders]
        assert steps[0].doc_ids_hash == steps[1].doc_ids_hash and steps[0].epoch == steps[1].epoch
        for mine, theirs in zip(steps[0].micro_batches, steps[1].micro_batches, strict=True):
            for field in dataclasses.fields(mine):
                ours, other = (getattr(batch, field.name) for batch in (mine, theirs))
                assert ours.tolist() == other.tolist() if hasattr(ours, "tolist") else ours == other


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["data.add_eos=false"], "was prepared otherwise than this run reads data: EOS"),
        (["data.path={PATH: 1}"], "can be data.path alone"),
    ],
)
def test_refused_before_ranks_start(folder, tmp_path, more, told):
    more = [one.replace("PATH", str(folder)) for one in more]
    with pytest.raises(ValueError, match=told):
        check(configuration(tmp_path, CHATS, f"data.path={folder}", *more, rows=ROWS))


def test_an_unfinished_folder_is_told(folder, tmp_path):
    (folder / "prepared.json").rename(folder / "unfinished.json")
    with pytest.raises(ValueError, match="holds no finished prepared data"):
        check(configuration(tmp_path, CHATS, f"data.path={folder}", rows=ROWS))
