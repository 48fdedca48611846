"""What a user can get wrong is refused by one paragraph before any rank waits for another."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hsap.data.loader import StepLoader
from hsap.data.packing import count_long
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.tensorfile import write_tensors
from hsap.train.attention import planning_setup
from hsap.train.checkpoints.folder import STATE, folder, publish, unfinished
from hsap.train.inputs import check, read_inputs
from tests.parity import REPOSITORY, SMALL_MODEL
from tests.parity.rank import configure


def configuration(where, *arguments, world_size=1, rows=({"tokens": [2, 3, 4, 5]},)):
    path = where / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    usual = {
        "data.path": path,
        "data.eval_path": "null",
        "data.tokenizer": REPOSITORY / "datasets/demo/tokenizer.json",
        "data.cache": where / "cache",
        "data.pack_tokens": 16,
        "train.packs_per_step": 4,
        "out": where / "out",
        **SMALL_MODEL,
    }
    return configure([*(f"{key}={value}" for key, value in usual.items()), *arguments], world_size)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["planner=unheard_of"], "unknown name 'unheard_of'; known planners are ring, "),
        (["planner.balanced=area"], "planner sap: unknown option 'balanced'; it takes balance, "),
        (["planner.balance=luck"], "balance='luck'; choose area"),
        (["data.tokenizer=nowhere.json"], "tokenizer nowhere.json doesn't exist; set data.tokenizer"),
        (["data.chat_template=nowhere"], "data.chat_template=nowhere: no chat template there; set it to chatml, "),
        (["data.chat_fields={massages: talk}"], "data.chat_fields.massages: no field of chats; they have chosen, "),
        (["data.path=nowhere.jsonl"], "data set nowhere.jsonl doesn't exist; set data.path"),
        (["data.eval_path=nowhere.jsonl"], "data set nowhere.jsonl doesn't exist; set data.path (or data.eval_path)"),
        (["model.vocab_size=300"], "model.vocab_size is 300, but the tokenizer has "),
        (["model.num_kv_heads=3"], "model.num_kv_heads is 3, which does not divide"),
        (["model.depth=3"], "model.depth: no such key"),
        (["model.masks=widow:4"], "model.masks is 'widow:4': mask: unknown name 'widow'"),
        (["model.masks=causal*3"], "model.masks names 3 layers, which don't go into model.num_layers 2"),
        (
            ["+cluster.inter_bytes_per_s=0"],
            "cluster cpu-gloo: inter_bytes_per_s is 0; it must",
        ),
        (["resume=true"], "has no checkpoint; set out= to the run's directory"),
    ],
)
def test_refused_without_reading_data(tmp_path, arguments, told):
    with pytest.raises(ValueError) as error:
        check(configuration(tmp_path, *arguments))
    assert told in str(error.value)


def test_more_intra_ranks_than_heads_lists_the_legal_degrees(tmp_path):
    with pytest.raises(ValueError, match=r"intra_sp=9 is more than the 8 query heads.*legal degrees are 1 to 8;"):
        check(configuration(tmp_path, "+topology=1x9", world_size=9))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("engine.dtype=fp8", "engine.dtype=fp8: expected one of fp32, bf16"),
        ("engine.zero_stage=4", "engine.zero_stage=4: expected one of 0, 1, 2, 3"),
        (
            "data.long_documents=keep",
            "data.long_documents=keep with data.max_document_tokens=None; the limit is needed",
        ),
        ("data.curriculum=[[9,32],[5,64]]", "data.curriculum has the steps [9, 5]; they must ascend"),
        ("train.packs_per_step=3", "train.packs_per_step=3 doesn't divide over dp=2"),
    ],
)
def test_refused_by_the_configuration_alone(tmp_path, argument, told):
    with pytest.raises(ValueError) as error:
        configuration(tmp_path, "+topology=1x1", argument, world_size=2)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"tokens": [2, 3]}, '{"tokens": [2, 3'], "data.jsonl:2: not valid JSON"),
        ([{"tokens": [2, 3]}, {"tokens": [5, 2048]}], "data.jsonl:2: token 1 of the document has id 2048, outside"),
        ([{"tokens": [-1]}], "data.jsonl:1: token 0 of the document has id -1, outside"),
        ([{"words": "a"}], "data.jsonl:1: the row is no chat and has none of the fields"),
        ([{"text": ""}], "holds no document: 1 file(s) read, 1 document(s) without text"),
        ([], "holds no document"),
    ],
)
def test_refused_data_names_file_and_line(tmp_path, rows, told):
    with pytest.raises(ValueError) as error:
        read_inputs(configuration(tmp_path, rows=rows))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("kernel", "told"),
    [("flash_attn", "kernel flash_attn lacks device cpu"), ("unheard_of", "there is no kernel 'unheard_of'")],
)
def test_a_kernel_that_can_not_do_it_is_refused(tmp_path, kernel, told):
    with pytest.raises(ValueError) as error:
        read_inputs(configuration(tmp_path, f"kernel={kernel}"))
    assert told in str(error.value)


def test_layers_to_profile_are_the_model_s(tmp_path):
    check(configuration(tmp_path, "profile.layers=[1,0]"))
    with pytest.raises(
        ValueError, match=r"profile\.layers=\[0, 9\]: the model has 2 layers, 0 to 1; name some of them"
    ):
        check(configuration(tmp_path, "profile.layers=[0,9]"))


def save_state(config, step=10):
    """Leave what a checkpoint of this configuration would, without weights."""
    fresh = unfinished(folder(config), step)
    fresh.mkdir(parents=True)
    state = {"step": step, "cursor": {"step": step}, "topology": config.topology}
    state["identity"] = read_inputs(config).identity
    files = {"rank0.safetensors": write_tensors(fresh / "rank0.safetensors", {})}
    publish(folder(config), step, {**state, "adam_steps": step}, files, keep=2)


CHANGES = [
    (["train.seed=7"], "train.seed was 1234, now 7"),
    (["train.packs_per_step=8"], "train.packs_per_step was 4, now 8"),
    (["data.pack_tokens=32"], "data.pack_tokens was 16, now 32"),
    (["data.packing=concat"], "data.packing was best_fit, now concat"),
    (["data.long_documents=drop"], "data.long_documents was cut, now drop"),
    (["data.max_delay_steps=2"], "data.max_delay_steps was 128, now 2"),
    (["data.curriculum=[[5,32]]"], "data.curriculum was None, now [[5, 32]]"),
    (["data.loss=all"], "data.loss was assistant, now all"),
    (["data.answers=best"], "data.answers was all, now best"),
    (["data.trees=best"], "data.trees was all, now best"),
    (["data.chat_date='2025-01-01'"], "data.chat_date was 2024-07-26, now 2025-01-01"),
    (["data.add_bos=false"], "data.add_bos was True, now False"),
    (["data.add_eos=false"], "data.add_eos was True, now False"),
    (["data.eos='<s>'"], "data.eos was </s>, now <s>"),
    (["engine.dtype=bf16"], "engine.dtype was fp32, now bf16"),
    (["model.ffn_dim=128"], "model.ffn_dim was 96, now 128"),
    (["model.masks=[window:4,causal]"], "model.masks was causal, now window:4+causal"),
]


def test_a_resumed_run_may_change_only_what_does_not_matter(tmp_path):
    save_state(configuration(tmp_path))
    for arguments, told in CHANGES:
        with pytest.raises(ValueError) as error:
            check(configuration(tmp_path, "resume=true", *arguments))
        assert "belongs to another run: " in str(error.value) and told in str(error.value)
    (tmp_path / "tokenizer.json").write_text((REPOSITORY / "datasets/demo/tokenizer.json").read_text() + "\n")
    with pytest.raises(ValueError, match=r"data\.tokenizer was sha256 \w+, now sha256 \w+\."):
        check(configuration(tmp_path, "resume=true", f"data.tokenizer={tmp_path / 'tokenizer.json'}"))
    free = ["optim.lr=1.0e-4", "train.micro_packs=2", "planner=ring", "model.loss_chunk_tokens=7", "train.steps=11"]
    free += ["engine.zero_stage=3", "+topology=2x1", "data.lookahead=0", "kernel=math", "wire_dtype=bf16"]
    free += ["data.add_bos=true", "data.eos='</s>'"]  # what null has stood for
    assert read_inputs(configuration(tmp_path, "resume=true", *free, world_size=4)).checkpoint["step"] == 10


def test_a_resumed_run_keeps_the_weights_of_its_data_sets_and_its_curriculum(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"tokens": [2, 3]}\n{"tokens": [4, 5, 6]}\n')
    same = ("data.curriculum=[[5,32]]", "data.exhausted=stop")

    def mixed(*weights):
        return f"data.path={{{','.join(f'{tmp_path}/{name}.jsonl:{w}' for name, w in zip('ab', weights))}}}"

    save_state(configuration(tmp_path, mixed(2, 1), *same))
    assert read_inputs(configuration(tmp_path, "resume=true", mixed(4, 2), *same)).checkpoint["step"] == 10
    with pytest.raises(ValueError, match=r"weights of data\.path was \[0\.66\d*, 0\.33\d*\], now \[0\.5, 0\.5\]"):
        check(configuration(tmp_path, "resume=true", mixed(1, 1), *same))
    with pytest.raises(ValueError, match=r"data\.exhausted was stop, now restart"):
        check(configuration(tmp_path, "resume=true", mixed(2, 1), same[0]))


def test_a_resumed_run_must_see_the_same_data_but_it_may_lie_elsewhere(tmp_path):
    save_state(configuration(tmp_path))
    with pytest.raises(ValueError, match=r"data\.path was 1 documents, 4 tokens, .*, now 1 documents, 4 tokens, "):
        read_inputs(configuration(tmp_path, "resume=true", rows=[{"tokens": [2, 3, 4, 6]}]))
    config = configuration(tmp_path, "resume=true", f"data.path={tmp_path / 'moved.jsonl'}")
    (tmp_path / "data.jsonl").rename(tmp_path / "moved.jsonl")
    assert read_inputs(config).checkpoint["step"] == 10


def test_a_resumed_run_keeps_what_its_chat_template_says_wherever_that_lies(tmp_path):
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    for name, text in (("one", template), ("two", template), ("three", template + "{# of another kind #}")):
        (tmp_path / f"{name}.jinja").write_text(text)

    def named(name, *more, rows=(SAID,)):
        return configuration(tmp_path, *CHAT[1:], f"data.chat_template={tmp_path / name}.jinja", *more, rows=rows)

    save_state(named("one"))
    assert read_inputs(named("two", "resume=true")).checkpoint["step"] == 10
    with pytest.raises(ValueError, match=r"data\.chat_template was sha256 \w+, now sha256 \w+[;.]"):
        read_inputs(named("three", "resume=true"))
    # Without chats no template has a part in what is trained.
    rows = ({"text": "a"},)
    plain = f"out={tmp_path / 'plain'}"
    save_state(named("one", plain, rows=rows))
    assert read_inputs(named("three", plain, "resume=true", rows=rows)).checkpoint["step"] == 10


def test_a_checkpoint_beyond_the_last_step_or_damaged_is_refused(tmp_path):
    config = configuration(tmp_path)
    save_state(config)
    with pytest.raises(ValueError, match=r"is of step 10, but train\.steps=9"):
        check(configuration(tmp_path, "resume=true", "train.steps=9"))
    for damaged in ("{", '{"step": 10}'):
        (folder(config) / "step10" / STATE).write_text(damaged)
        with pytest.raises(ValueError, match=r"latest names step10, which can't be used: .*hsap\.json can't be read"):
            check(configuration(tmp_path, "resume=true"))


def test_a_new_run_does_not_overwrite_checkpoints(tmp_path):
    config = configuration(tmp_path)
    check(config)
    save_state(config)
    with pytest.raises(ValueError, match=r"holds the checkpoints of a run \(step10\); set resume=true"):
        check(config)


def test_a_new_run_does_not_overwrite_the_metrics_of_a_run_without_checkpoints(tmp_path):
    config = configuration(tmp_path)
    metrics = Path(config.out) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.touch()
    check(config)  # that one never finished a step
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"holds the metrics of a run that kept no checkpoint to go on from; set anot"):
        check(config)


def test_plans_are_made_for_the_masks_of_the_layers(tmp_path):
    config = configuration(tmp_path, "model.masks=[window:4,causal,window:4]", "model.num_layers=6")
    plan = planning_setup(config, read_inputs(config).model, 0).compile(Layout.from_lengths([9, 3]))
    assert plan.problem.masks == ((Mask("window", (4,)), 4), (Mask(), 2)) and len(plan.programs) == 2


def test_unequal_weight_shards_take_planners_that_place_alike(tmp_path):
    nine = ("+topology=2x1", "parallel=tsp", "model.num_q_heads=9", "model.num_kv_heads=3")
    check(configuration(tmp_path, *nine, "planner=zigzag", world_size=2))
    with pytest.raises(ValueError, match=r"planner=nested places tokens by heads.*set planner to one of ring, zigzag"):
        check(configuration(tmp_path, *nine, "planner=nested", world_size=2))
    eight = ("+topology=4x1", "parallel=tsp", "model.num_q_heads=2", "model.num_kv_heads=1")
    with pytest.raises(ValueError, match="the largest degree of this model is 2"):
        check(configuration(tmp_path, *eight, world_size=4))


def test_data_comes_in_other_formats_and_mixed_by_weights(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(2, 26).reshape(6, 4))
    np.arange(100, 112, dtype="u2").tofile(tmp_path / "b.bin")
    config = configuration(tmp_path, f"data.path={tmp_path / 'b.bin'}", "data.end_id=103")
    assert read_inputs(config).train_data.lengths.tolist() == [4, 8]
    mixed = f"data.path={{{tmp_path / 'a.npy'}:2,{tmp_path / 'b.bin'}:1}}"
    data = read_inputs(configuration(tmp_path, mixed, "data.end_id=103")).train_data
    from_a, from_b = ([one for one in data.ids if one.split("/")[-1].startswith(name)] for name in ("a.npy", "b.bin"))
    assert len(from_a) >= 6 and abs(len(from_a) - 2 * len(from_b)) <= 6, "until both have ended, two to one"
    assert sum("@" not in one for one in data.ids) == 8 and len(set(data.ids)) == len(data.ids)
    with pytest.raises(ValueError, match=r"data\.format=csv: expected one of json, parquet"):
        configuration(tmp_path, "data.format=csv")
    with pytest.raises(ValueError, match="is no readable parquet file"):
        read_inputs(configuration(tmp_path, "data.format=parquet"))
    with pytest.raises(ValueError, match=r"data\.path=.*expected a file or a directory, or several with their weights"):
        configuration(tmp_path, f"data.path={{{tmp_path / 'a.npy'}:-2}}")


def test_what_is_left_out_is_told(tmp_path):
    rows = [{"text": "a"}, {"text": ""}, {"text": ""}]
    assert read_inputs(configuration(tmp_path, rows=rows[:1])).left_out == ()
    (told,) = read_inputs(configuration(tmp_path, rows=rows)).left_out
    assert told.startswith("of the documents of data.path 2 left out: 2 for no text and no tokens (")
    assert "data.jsonl:2, " in told


def test_a_run_on_own_data_says_that_it_is_evaluated_on_the_demo(tmp_path):
    demo = REPOSITORY / "datasets/demo"
    held_out = f"data.eval_path={demo / 'eval.jsonl.gz'}"
    (notice,) = read_inputs(configuration(tmp_path, held_out)).notices
    assert "data.eval_path is the demo's text until set" in notice and "data.eval_path=null" in notice
    assert read_inputs(configuration(tmp_path, held_out, "train.eval_every=0")).notices == ()
    assert read_inputs(configuration(tmp_path, held_out, f"data.path={demo / 'train.jsonl.gz'}")).notices == ()
    own = configuration(tmp_path, held_out, "data.text_field=body", rows=[{"body": "a"}])
    with pytest.raises(ValueError, match=r"eval\.jsonl\.gz:1: .*; data\.eval_path is the demo's text until set"):
        read_inputs(own)


SAID = {"talk": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
ANSWERED = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
CHAT = ("data.chat_template=chatml", "data.chat_fields={messages: talk}", "data.pack_tokens=100")


def test_chats_are_read_and_what_is_left_out_is_told(tmp_path):
    weighed = {"talk": [SAID["talk"][0], {**SAID["talk"][1], "loss_weight": 0.5}]}
    rows = [SAID, {**ANSWERED, "chosen": "hello " * 99}, ANSWERED, weighed]
    config = configuration(tmp_path, *CHAT, rows=rows)
    read = read_inputs(config)
    assert [*read.train_data.ids] == [f"data.jsonl:{line}" for line in (1, 2, 3)]
    assert read.train_data.uncut.tolist() == [False, True, True]
    assert 0 < read.train_data.trained[:].sum() < len(read.train_data.tokens)
    (told,) = read.left_out
    assert told.startswith("of the documents of data.path 1 left out: ")
    assert f"1 for a loss weight other than 0 and 1 ({tmp_path}/data.jsonl:4)" in told
    (long,) = count_long(read.train_data.lengths, read.train_data.uncut, config.packing)
    assert str(long).startswith("longer than 100 tokens: 1 dropped (") and long.cut_chats == 0
    (notice,) = read.notices
    assert "<|im_start|> (" in notice and read_inputs(configuration(tmp_path, rows=[{"text": "a"}])).notices == ()
    assert read.chats.tolist() == [1, 1, 1] and read_inputs(configuration(tmp_path, rows=[{"text": "a"}])).chats is None
    best = read_inputs(configuration(tmp_path, *CHAT, "data.answers=best", rows=[ANSWERED]))
    assert best.train_data.answers is None
    everything = read_inputs(configuration(tmp_path, *CHAT, "data.loss=all", rows=[SAID]))
    assert everything.train_data.trained[:].all()
    answers = read_inputs(configuration(tmp_path, *CHAT, rows=[SAID]))
    assert everything.identity["data.path"] != answers.identity["data.path"]


def test_a_run_of_rejected_chats_or_of_answers_under_a_mask_without_meaning_is_refused(tmp_path):
    long = {**ANSWERED, "chosen": "hello " * 99}
    with pytest.raises(ValueError, match=r"every document is longer than data.pack_tokens=100 and dropped"):
        read_inputs(configuration(tmp_path, *CHAT, rows=[long, long]))
    none = {"talk": [*SAID["talk"], SAID["talk"][0]]}
    with pytest.raises(ValueError, match=r"holds no document: .*1 for a conversation that ends .*data.jsonl:1"):
        read_inputs(configuration(tmp_path, *CHAT, rows=[none]))
    with pytest.raises(ValueError, match="mask full: what the answers to a shared question see"):
        read_inputs(configuration(tmp_path, *CHAT, "model.masks=full", rows=[ANSWERED]))
    with pytest.raises(ValueError, match=r"data.jsonl:1: this is a chat, .* set data.chat_template"):
        read_inputs(configuration(tmp_path, CHAT[1], rows=[SAID]))


def test_of_text_tokens_and_a_chat_in_a_row_the_chat_is_meant_where_a_template_is_named(tmp_path):
    rows = [{"text": "hi hello"}, {"text": "hi hello", **SAID}, {"tokens": [5, 6], **SAID}, {"text": "", "talk": ["x"]}]
    read = read_inputs(configuration(tmp_path, *CHAT[1:], rows=rows))
    first, second, third = np.split(read.train_data.tokens[:], read.train_data.starts[1:-1])
    assert read.train_data.trained is None and (first == second).all() and third.tolist() == [5, 6]
    read = read_inputs(configuration(tmp_path, *CHAT, rows=rows))
    plain, *chats = np.split(read.train_data.tokens[:], read.train_data.starts[1:-1])
    assert (plain == first).all() and (chats[0] == chats[1]).all() and len(chats[0]) > len(plain)
    assert "1 for a turn is no object" in read.left_out[0], "a chat that is none isn't trained as its text"


def test_a_template_beside_the_tokenizer_is_used_for_chats_and_needn_t_be_sound_for_other_data(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(REPOSITORY / "datasets/demo/tokenizer.json", folder)
    beside = (f"data.tokenizer={folder}", *CHAT[1:])
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    assert read_inputs(configuration(tmp_path, *beside, rows=[SAID])).train_data.trained[:].any()
    assert read_inputs(configuration(tmp_path, *beside, rows=[{"text": "a", **SAID}])).train_data.trained is None
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert len(read_inputs(configuration(tmp_path, *beside, rows=[{"text": "a"}])).train_data.ids) == 1
    with pytest.raises(ValueError, match=r"chat template .*tokenizer, line 1: .* set data.chat_template to another"):
        read_inputs(configuration(tmp_path, *beside, rows=[{"text": "a"}, SAID]))
    with pytest.raises(ValueError, match=r"chat template .*, line 1: "):
        check(configuration(tmp_path, *beside, f"data.chat_template={folder}"))


def test_labels_of_a_data_set_become_labels_of_the_batch(tmp_path):
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [9, 3]},
        {"input_ids": [0, 4, 5, 6], "attention_mask": [0, 1, 1, 1], "loss_mask": [0, 1, 1, 0]},
        {"input_ids": [5, 6, 7], "labels": [6, 7, -100]},
    ]
    config = configuration(tmp_path, rows=rows)
    read = read_inputs(config)
    assert "1 for labels that are neither their tokens nor -100" in read.left_out[0]
    with StepLoader(read.train_data, config.packing, packs_per_step=1) as loader:
        (batch,) = next(loader).micro_batches
    labels = np.split(batch.labels, np.cumsum(batch.lengths)[:-1])
    assert {name: part.tolist() for name, part in zip(batch.document_ids, labels, strict=True)} == {
        "data.jsonl:1": [-100, 7, 8, -100],
        "data.jsonl:2": [3, -100],
        "data.jsonl:3": [5, -100, -100],
    }
    assert batch.num_targets == 4
