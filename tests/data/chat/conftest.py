"""Tokenizers for the tests of chats."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hsap.data.tokenise import load_tokenizer

CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def save_bytes(path, controls=CONTROLS):
    """Write a tokenizer.json whose tokens are single bytes and control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(c, normalized=False) if isinstance(c, str) else c for c in controls])
    path.parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(path))
    return path


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory):
    """A tokenizer in which every token's text is plain, with ChatML's markers and BOS and EOS as control tokens."""
    return load_tokenizer(save_bytes(tmp_path_factory.mktemp("bytes") / "tokenizer.json"))
