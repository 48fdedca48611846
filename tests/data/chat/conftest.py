"""Tokenizers for the tests of chats."""

import pytest

from hsap.data.tokenizer import load_tokenizer
from tests.data.chat.told import save_bytes


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory):
    """A tokenizer in which every token's text is plain, with ChatML's markers and BOS and EOS as control tokens."""
    return load_tokenizer(save_bytes(tmp_path_factory.mktemp("bytes") / "tokenizer.json"))
