"""Raw data goes through the cache, and is to training what it is in memory and what it is prepared by hand."""

import dataclasses

import pytest

from hsap.data import prepared
from hsap.data.loader import StepLoader
from hsap.train.inputs import check, prepare_data, read_inputs
from tests.train.test_inputs import ANSWERED, CHAT, SAID, configuration, save_state

ROWS = [
    *({"text": f"Document {i} about {i % 5} whales."} for i in range(30)),
    *(SAID, ANSWERED, {**ANSWERED, "chosen": "hello " * 99}, {"text": ""}, {"tokens": [5, 6, 7], "labels": [5, 6, 7]}),
]


@pytest.mark.parametrize("packing", ["best_fit", "concat", "balanced"])
def test_steps_are_those_of_memory(tmp_path, packing):
    more = (*CHAT, f"data.packing={packing}", f"data.eval_path={tmp_path / 'data.jsonl'}", "train.eval_every=1")
    config = configuration(tmp_path, *more, rows=ROWS)
    kept = read_inputs(config)
    whole = read_inputs(configuration(tmp_path, *more, "data.cache=null", rows=ROWS))
    assert kept.left_out == whole.left_out and len(kept.left_out) == 2 and kept.identity == whole.identity
    assert kept.eval_data.tokens[:].tolist() == whole.eval_data.tokens.tolist()
    loaders = [StepLoader(one.train_data, config.packing, packs_per_step=2, lookahead=0) for one in (kept, whole)]
    for _ in range(12):
        mine, theirs = (next(loader) for loader in loaders)
        assert mine.doc_ids_hash == theirs.doc_ids_hash and mine.epoch == theirs.epoch
        for one, other in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            for field in dataclasses.fields(one):
                a, b = (getattr(batch, field.name) for batch in (one, other))
                assert a.tolist() == b.tolist() if hasattr(a, "tolist") else a == b


@pytest.mark.parametrize("begun", ["raw", "memory", "prepared"])
def test_a_run_goes_on_from_raw_data_from_memory_and_from_what_was_prepared(tmp_path, begun):
    raw = configuration(tmp_path, *CHAT, rows=ROWS)
    prepared.prepare(raw.data, tmp_path / "prepared")
    # Prepared data know the template of their chats.
    forms = {
        "raw": CHAT,
        "memory": (*CHAT, "data.cache=null"),
        "prepared": (CHAT[-1], f"data.path={tmp_path / 'prepared'}"),
    }
    save_state(configuration(tmp_path, *forms[begun], rows=ROWS))
    for form in forms.values():
        assert read_inputs(configuration(tmp_path, "resume=true", *form, rows=ROWS)).checkpoint["step"] == 10
    changed = [*ROWS[:-1], {"tokens": [5, 6, 8], "labels": [5, 6, 8]}]
    with pytest.raises(ValueError, match=r"another run: data\.path was \d+ documents, .*, now \d+ documents"):
        read_inputs(configuration(tmp_path, "resume=true", *CHAT, rows=changed))


def test_a_mixture_goes_on_from_what_was_prepared_of_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"tokens": [2, 3]}\n{"tokens": [4, 5, 6]}\n')
    mixed = f"data.path={{{tmp_path}/a.jsonl:3,{tmp_path}/b.jsonl:1}}"
    config = configuration(tmp_path, mixed)
    save_state(config)
    prepared.prepare(config.data, tmp_path / "prepared", seed=config.train.seed)
    stored = configuration(tmp_path, "resume=true", f"data.path={tmp_path / 'prepared'}")
    assert read_inputs(stored).checkpoint["step"] == 10
    prepared.prepare(config.data, tmp_path / "other", seed=config.train.seed + 1)
    with pytest.raises(ValueError, match=r"data\.path was .*, now "):
        read_inputs(configuration(tmp_path, "resume=true", f"data.path={tmp_path / 'other'}"))


def test_who_starts_ranks_prepares_all_that_they_read(tmp_path, monkeypatch):
    other = tmp_path / "other.jsonl"
    other.write_text('{"tokens": [2, 3]}\n')
    more = (f"data.eval_path={other}", "train.eval_every=1")
    config = configuration(tmp_path, *more, rows=ROWS[:9])
    check(config)
    assert not (tmp_path / "cache").exists(), "judging reads no data"
    prepare_data(config)
    monkeypatch.setattr("hsap.data.prepared.cache.prepare", lambda *_: pytest.fail("prepared again"))
    assert read_inputs(config).eval_data.lengths.tolist() == [2]
    with pytest.raises(ValueError, match=r"data\.jsonl:1: the row is no chat"):
        monkeypatch.undo()
        prepare_data(configuration(tmp_path, rows=[{"words": "a"}]))
