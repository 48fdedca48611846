"""`hsap prepare` and `hsap data`: what they print, and that what is shown is what is trained."""

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml

from hsap.cli import main, settings
from hsap.cli.lengths import histogram, percentiles
from hsap.cli.packs import marked, runs
from hsap.data import prepared
from hsap.data.config import OF_PACKS, READING, DataConfig, data_config
from hsap.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = str(ROOT / "datasets/demo/tokenizer.json")
FILES = ROOT / "tests/data/files"


@pytest.fixture
def chats(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I — 象形 🐋."}]},
        {"prompt": "Yes or\nno?", "chosen": "Yes\x1b[2J.", "rejected": "No."},
        {"messages": [{"role": "user", "content": "Nobody answers."}]},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_flags_are_the_data_settings():
    names = {field.name for field in fields(DataConfig)}
    assert sorted(settings.READING) == sorted(READING) and sorted(settings.PACKING) == sorted(OF_PACKS)
    others = {"path", "eval_path", "tokenizer", "cache", "lookahead", "workers"}
    # A new setting has to be told to the lists by which data are prepared, packed and resumed.
    assert sorted(names) == sorted([*READING, *OF_PACKS, *others])
    assert data_config({"path": "a", "tokenizer": TOKENIZER}).cache == settings.CACHE
    train = yaml.safe_load((ROOT / "configs/train/demo.yaml").read_text())
    assert (train["seed"], train["packs_per_step"]) == (settings.SEED, settings.PACKS_PER_STEP)


def test_prepare_tells_lengths_and_what_it_left_out(capsys, chats, tmp_path):
    arguments = ["prepare", chats, "-o", tmp_path / "out", "--tokenizer", TOKENIZER, "--chat-template", "chatml"]
    code, out, err = run(capsys, *arguments, "--workers", 1)
    assert code == 0 and err.count("\n") == 1, "the demo's tokenizer knows no markers of chats"
    assert "are written as words: <|im_start|> (8 tokens), <|im_end|> (7 tokens); right if" in err
    store = prepared.open_store(tmp_path / "out")
    assert f"2 documents, {len(store.tokens)} tokens (" in " ".join(out.split())
    assert f"longest {store.lengths.max()}, mean {store.lengths.mean():.1f}" in " ".join(out.split())
    assert "        1 a conversation that ends without an answer" in out
    assert out.endswith(f"data.path={tmp_path / 'out'} data.tokenizer={TOKENIZER} data.chat_template=chatml\n")
    code, out, _ = run(capsys, *arguments, "--json")
    figures = json.loads(out)
    assert code == 0 and figures["tokens"] == store.lengths.sum() and figures["longest"] == store.lengths.max()
    assert figures["trained_tokens"] == store.trained[:].sum()
    reason = {"reason": "a conversation that ends without an answer", "documents": 1, "examples": [f"{chats}:3"]}
    assert figures["left_out"] == [reason]


def test_a_report_fits_eighty_columns(capsys, tmp_path):
    arguments = ["prepare", ROOT / "datasets/demo/eval.jsonl.gz", "-o", tmp_path / "out", "--tokenizer", TOKENIZER]
    code, out, _ = run(capsys, *arguments, "--workers", 1)
    assert code == 0 and all(len(line) <= 80 for line in out.splitlines()[:-1])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--loss", "some"], "--loss=some: expected one of assistant, last_assistant, weighted, all"),
        (["--end-id", "-3"], "--end-id=-3: expected a whole number of at least 0"),
        (["--chat-fields", "{a"], "--chat-fields: '{a' isn't YAML"),
        (["--chat-template", "own"], "--chat-template=own: no chat template there; set it to chatml"),
        (["--text-field", "body"], "set --chat-template to chatml, llama2, mistral"),
        (["--workers", "0"], "--workers is 0; it must be a whole number from 1"),
        (["--format", "csv"], "--format=csv: expected one of json"),
    ],
)
def test_prepare_refuses_in_one_paragraph(capsys, chats, tmp_path, flags, told):
    code, out, err = run(capsys, "prepare", chats, "-o", tmp_path / "out", "--tokenizer", TOKENIZER, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_misspelt_flag_is_told_the_one_meant(capsys, chats, tmp_path):
    with pytest.raises(SystemExit):
        main(["prepare", chats, "-o", str(tmp_path / "out"), "--text-feild", "body"])
    assert "--text-feild body; did you mean --text-field; see hsap prepare --help" in capsys.readouterr().err


def test_what_the_template_says_is_told_where_it_takes_no_chat(capsys, tmp_path):
    call = {"function": {"name": "look", "arguments": {}}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "tools.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    arguments = [tmp_path / "tools.jsonl", "-o", tmp_path / "out", "--tokenizer", TOKENIZER, "--workers", 1]
    code, _, err = run(capsys, "prepare", *arguments, "--chat-template", "mistral")
    assert code == 2 and "Mistral has no form for tools" in err and "set --chat-template to one that has a form" in err
    assert not (tmp_path / "out").exists()


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("hsap.data.prepared.progress._EVERY_S", 0.0)
    with prepared.Progress("hsap prepare") as progress:
        for counts in ((3, 500), (1000, 70_000)):
            progress(*counts)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "hsap prepare: goes on behind 3 documents, 500 tokens" and len(lines) == 2
    assert lines[1].startswith("hsap prepare: 1,000 documents, 70,000 tokens, ")


def test_null_and_words_are_told_apart(chats):
    parsed = settings.read(
        type("Flags", (), {"text_field": "null", "id_field": "7", "end_id": "7", "add_bos": "false"}), chats, TOKENIZER
    )
    assert (parsed.text_field, parsed.id_field, parsed.end_id, parsed.add_bos) == (None, "7", 7, False)
    assert settings.path_of(["{a: 1, b: 2}"]) == {"a": 1, "b": 2} and settings.path_of(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_data_shows_what_is_trained(capsys, chats, tmp_path, is_prepared):
    source = [chats, "--tokenizer", TOKENIZER, "--chat-template", "chatml"]
    if is_prepared:
        assert run(capsys, "prepare", *source, "-o", tmp_path / "out", "--workers", 1)[0] == 0
        source = [tmp_path / "out"]
    code, out, _ = run(capsys, "data", *source, "--pack-tokens", 512, "--packs", 1)
    assert code == 0 and "\x1b" not in out
    assert out.startswith(f"{source[0]}: 2 documents, ")
    assert "1 left out: 1 for a conversation that ends without an answer" in out
    assert "⟦ ⟧ is trained; ‹…› is a control token" in out
    assert out.count("are written as words: <|im_start|> (8 tokens)") == 1
    assert "user\nWho?<|im_end|>\n<|im_start|>assistant\n⟦I — 象形 🐋.<|im_end|>⟧" in out
    assert re.search(r"\.\.\. answer 1 of 2, .*\n+⟦Yes\\x1b\[2J\.<\|im_end\|>⟧\n+\.\.\. answer 2 of 2.*\n+⟦No\.<", out)
    code, out, _ = run(capsys, "data", *source, "--pack-tokens", 512, "--packs", 1, "--color")
    assert "\x1b[32mI — 象形 🐋." in out and "⟦" not in out


def test_data_takes_what_training_has_prepared_and_writes_nothing(capsys, chats, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = ["data", chats, "--tokenizer", TOKENIZER, "--chat-template", "chatml", "--pack-tokens", 512]
    code, whole, _ = run(capsys, *source)
    assert code == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]
    data = {"path": chats, "tokenizer": TOKENIZER, "chat_template": "chatml"}
    prepared.cached(data_config(data), chats)
    monkeypatch.setattr("hsap.data.prepared.read_whole", lambda *_: pytest.fail("tokenised again"))
    assert run(capsys, *source) == (0, whole, "")


def test_cut_documents_say_where_they_go_on(capsys, tmp_path):
    (tmp_path / "a.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely.")
    arguments = [tmp_path / "a.txt", "--tokenizer", TOKENIZER, "--pack-tokens", 8, "--policy", "concat"]
    code, out, _ = run(capsys, "data", *arguments, "--packs", 2)
    tokenizer = load_tokenizer(TOKENIZER)
    tokens = tokenizer.encode_document((tmp_path / "a.txt").read_text())
    assert code == 0 and f"tokens 0 to 8 of {len(tokens)}, 8 trained" in out
    after = tokenizer.decode(tokens[8:9])
    assert f"goes on in another pack; its next token, {after!r}, is trained here" in out
    assert "‹<s>›⟦Call me" in out


def test_steps_are_those_of_the_stream(capsys):
    source = ["data", ROOT / "datasets/demo/eval.jsonl.gz", "--tokenizer", TOKENIZER, "--packs-per-step", "2"]
    code, whole, _ = run(capsys, *source, "--packs", 6)
    _, third, _ = run(capsys, *source, "--packs", 2, "--step", 3)
    packs = [re.split(r"\n\n?(?==== step)", text)[1:] for text in (whole, third)]
    assert code == 0 and len(packs[0]) == 6 and packs[1] == packs[0][4:]
    assert run(capsys, *source, "--packs", 2, "--seed", 7)[1] != run(capsys, *source, "--packs", 2)[1]


def test_data_refuses_another_tokenizer_and_checks(capsys, chats, tmp_path):
    run(capsys, "prepare", chats, "-o", tmp_path / "out", "--tokenizer", TOKENIZER, "--chat-template", "chatml")
    other = tmp_path / "t.json"
    other.write_text(Path(TOKENIZER).read_text() + " ")
    code, out, err = run(capsys, "data", tmp_path / "out", "--tokenizer", other)
    assert (code, out) == (2, "") and "was prepared with" in err and "is another" in err
    assert "--loss: " in run(capsys, "data", tmp_path / "out", "--loss", "all")[2]
    code, out, _ = run(capsys, "data", tmp_path / "out", "--check")
    assert code == 0 and "sound; 2 documents" in out
    tokens = bytearray((tmp_path / "out/00000.tokens").read_bytes())
    tokens[0] ^= 1
    (tmp_path / "out/00000.tokens").write_bytes(tokens)
    code, out, err = run(capsys, "data", tmp_path / "out", "--check")
    assert (code, out) == (2, "") and "00000.tokens is damaged" in err
    for command in (["data", chats], ["prepare", chats, "-o", tmp_path / "new"]):
        err = run(capsys, *command)[2]
        assert err.startswith(f"hsap {command[0]}: --tokenizer: name the tokenizer.json") and "data of token ids" in err


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_text_however_it_is_cut(seed):
    tokenizer = load_tokenizer(TOKENIZER)
    rng = np.random.default_rng(seed)
    text = "naïve 象形 🐋 whales — and  the\tsea\n" * 3
    tokens = tokenizer.encode_document(text).tolist()
    trained = rng.random(len(tokens)) < rng.choice([0.1, 0.5, 0.9])
    parts = list(runs(tokenizer, tokens, trained))
    assert "".join(part for part, _, control in parts if not control) == tokenizer.decode(tokens) == text
    assert [part for part, _, control in parts if control] == ["<s>", "</s>"]
    shown = marked(iter(parts), colour=False)
    assert shown.replace("⟦", "").replace("⟧", "") == f"‹<s>›{text}‹</s>›", "words that spell a control token are none"
    assert list(runs(tokenizer, [], np.zeros(0, bool))) == []


def test_text_can_t_write_our_signs():
    parts = [("a‹<|im_end|>› ⟦b⟧", False, False), ("<|im_end|>", True, True)]
    assert marked(iter(parts), False) == r"a\u2039<|im_end|>\u203a \u27e6b\u27e7⟦‹<|im_end|>›⟧"


@pytest.mark.parametrize("colour", [False, True])
def test_text_can_t_write_our_borders(colour):
    heads = [
        "--- 2. b.jsonl:7: 5 tokens, 4 trained ---",
        "=== step 2, pack 1 of 2: 5 of 9 tokens ===",
        "... answer 1 ...",
    ]
    others = [
        "---",
        "--- a",
        "... and so on",
        "==== a ====",
        "  --- a ---",
        "-- a --",
        "--- a ===",
        "a --- b ---",
        "...",
    ]
    parts = [
        ("\n".join(heads[:2]) + "\n", True, False),
        (heads[2] + " \n", False, False),
        *((f"{other}\n", False, False) for other in others),
    ]
    lines = [re.sub("\x1b\\[\\d*m|[⟦⟧]", "", line) for line in marked(iter(parts), colour).split("\n")]
    escaped = [f"\\x{ord(head[0]):02x}{head[1:]}" for head in heads]
    assert lines == [*escaped[:2], f"{escaped[2]} ", *others, ""]


def test_lengths_are_counted():
    lengths = np.array([0, 1, 1, 2, 3, 4, 100])
    counted = [re.sub(r"[^\d., to%]", "", line).split() for line in histogram(lengths)[1:]]
    assert [line[:-2] for line in counted] == [
        *(["0", "1"], ["1", "2"], ["2", "to", "3", "2"], ["4", "to", "7", "1"], ["8", "to", "15", "0"]),
        *(["16", "to", "31", "0"], ["32", "to", "63", "0"], ["64", "to", "127", "1"]),
    ]
    assert percentiles(lengths)["p50"] == 2 and percentiles(lengths)["p99.9"] == 100
    assert histogram(np.zeros(0, int)) == [] and percentiles(np.zeros(0, int)) == {}
