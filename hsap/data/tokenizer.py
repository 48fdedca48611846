"""Tokenizer: text to token ids and back, by SentencePiece or by Hugging Face's `tokenizers`.

BOS and EOS: by default every document gets BOS before its first token and EOS after its last one, each where the
tokenizer has such a token; settings turn either off, or demand it. Within a document they are ordinary tokens: BOS
predicts the first word, the last word predicts EOS, and EOS, being last, predicts nothing. A document that arrives as
tokens is taken as it is. Text that spells a control token ("</s>") stays text. Chats have the control tokens that their
template writes, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hsap.ir.check import one_line, shown

BOS_NAMES = ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<|bos|>", "[BOS]")
EOS_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|eos|>", "[EOS]")
MAX_VOCAB_SIZE = 1 << 31
"""Ids are int32."""

_SPACES_AS_THEY_ARE = bytes([0x1A, 4, 0x18, 0, 0x20, 0])
"""Put behind a SentencePiece model: a protobuf message goes on with normalizer_spec { add_dummy_prefix: false
remove_extra_whitespaces: false }, and the last value of a field holds."""

After = Literal["start", "control", "text"]
"""What stands before a part of a text: nothing, a control token, or text."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that no text is read as. lstrip, rstrip: whether it swallows whitespace before it, behind it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer:
    """Text to token ids and back; made by `load_tokenizer`.

    vocab_size: one more than the largest id it can give. bos_id, eos_id: None where it has none.
    prefix, suffix: the ids put before and after every document (the BOS and EOS policy), empty or of one id.
    bos, eos: their pieces, None where it has none. control_tokens: by their pieces, BOS and EOS among them.
    """

    def __init__(self, backend: Any, add_bos: bool | None, add_eos: bool | None, name: str) -> None:
        self._backend = backend
        self.name = name
        self.vocab_size: int = backend.vocab_size
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"tokenizer {name} has the id {self.vocab_size - 1}; ids must be below {MAX_VOCAB_SIZE}")
        self.bos_id: int | None = backend.bos_id
        self.eos_id: int | None = backend.eos_id
        self.unk_id: int | None = backend.unk_id
        self.prefix = _border(self.bos_id, add_bos, "BOS", name)
        self.suffix = _border(self.eos_id, add_eos, "EOS", name)
        self.bos, self.eos = (None if i is None else backend.piece(i) for i in (self.bos_id, self.eos_id))
        borders = {piece: ControlToken(i) for piece, i in ((self.bos, self.bos_id), (self.eos, self.eos_id)) if piece}
        self.control_tokens: dict[str, ControlToken] = borders | backend.control_tokens()

    def encode(self, text: str) -> np.ndarray:
        """Encode text alone, without BOS and EOS: int32 [num_tokens]."""
        return np.array(self._backend.encode(text), dtype=np.int32)

    def encode_part(self, text: str, after: After) -> list[int]:
        """Encode a part of a longer text: a space that the tokenizer puts before text is put where it is due only."""
        return self._backend.encode_part(text, after) if text else []

    def encode_document(self, text: str) -> np.ndarray:
        """Encode a whole document with BOS and EOS as the policy says: int32 [num_tokens]."""
        return np.array([*self.prefix, *self._backend.encode(text), *self.suffix], dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode token ids to text; BOS and EOS give no text."""
        return self._backend.decode([int(token) for token in tokens])


def tokenizer_file(path: str | Path) -> Path:
    """Give the file of a tokenizer: the path itself, or what a directory holds; the path where it holds none."""
    path = Path(path)
    return next((path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()), path)


def load_tokenizer(
    path: str | Path,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    bos: str | None = None,
    eos: str | None = None,
) -> Tokenizer:
    """Load a tokenizer: Hugging Face's `tokenizer.json` (by its suffix .json), or a SentencePiece model.

    path: the file, or a directory that holds tokenizer.json or tokenizer.model.
    add_bos, add_eos: None adds the token where the tokenizer has one; True demands it; False leaves it out.
    bos, eos: the pieces to use; by default the tokenizer's own, or the first of `BOS_NAMES`, `EOS_NAMES` it knows.
    Errors (ValueError): a file that is missing or isn't a tokenizer; a piece it doesn't have.
    """
    path = tokenizer_file(path)
    if not path.is_file():
        raise ValueError(
            f"tokenizer {path} doesn't exist; set data.tokenizer to a Hugging Face tokenizer.json, a SentencePiece "
            f".model, or a directory that holds one"
        )
    backend = (_HuggingFace if path.suffix == ".json" else _SentencePiece)(path, bos, eos)
    return Tokenizer(backend, add_bos, add_eos, str(path))


def _border(token_id: int | None, wanted: bool | None, name: str, tokenizer: str) -> tuple[int, ...]:
    if wanted and token_id is None:
        raise ValueError(
            f"tokenizer {tokenizer} has no {name} token; name its piece in data.{name.lower()}, or set "
            f"data.add_{name.lower()}=false"
        )
    return (token_id,) if token_id is not None and wanted is not False else ()


def _piece_id(
    lookup: Callable[[str], int | None], name: str | None, usual: tuple[str, ...], setting: str, path: Path
) -> int | None:
    """Find a control token by the given name, or by the usual ones."""
    if name is not None and lookup(name) is None:
        raise ValueError(f"tokenizer {path} has no piece {name!r}; set data.{setting} to one that it has")
    candidates = usual if name is None else (name,)
    return next((lookup(piece) for piece in candidates if lookup(piece) is not None), None)


def _without_prefix(part: object) -> bool:
    """Take the space that a tokenizer puts before text out of its rules; says whether only a whole text's was there."""
    first_only = False
    if isinstance(part, dict):
        if part.get("type") == "Metaspace":
            first_only = part.get("prepend_scheme") == "first"
            part |= {"prepend_scheme": "never"} if "prepend_scheme" in part else {}
        if "add_prefix_space" in part and part.get("type") in ("ByteLevel", "Metaspace"):
            part["add_prefix_space"] = False
        for name, inner in part.items():
            first_only |= _without_prefix(inner)
            if isinstance(inner, dict) and inner.get("type") == "Prepend":
                part[name] = None
            elif isinstance(inner, list):
                part[name] = [one for one in inner if not (isinstance(one, dict) and one.get("type") == "Prepend")]
    elif isinstance(part, list):
        first_only = max(map(_without_prefix, part), default=False)
    return first_only


class _HuggingFace:
    """A tokenizer.json."""

    def __init__(self, path: Path, bos: str | None, eos: str | None) -> None:
        from tokenizers import Tokenizer as Backend

        self._path = path
        try:
            self._tokenizer = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"{path} is not a Hugging Face tokenizer.json ({error}); set data.tokenizer to one"
            ) from error
        # Files saved after use may carry these; a document is never cut or filled up by its tokenizer.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id = _piece_id(self._tokenizer.token_to_id, bos, BOS_NAMES, "bos", path)
        self.eos_id = _piece_id(self._tokenizer.token_to_id, eos, EOS_NAMES, "eos", path)

        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self.unk_id = None if unknown is None else self._tokenizer.token_to_id(unknown)
        self._bare: Any = None

    def encode(self, text: str) -> list[int]:
        return self._encoded(self._tokenizer, text)

    def _encoded(self, tokenizer: Any, text: str) -> list[int]:
        try:
            # The file's own post-processor would add BOS by a policy of its own.
            return tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"tokenizer {self._path} can't encode {shown(text)} ({one_line(error)}); repair it, or set "
                f"data.tokenizer to another"
            ) from error

    def encode_part(self, text: str, after: After) -> list[int]:
        if self._bare is None:
            values = json.loads(self._tokenizer.to_str())
            # The scheme "first" puts the space before a whole text only, any other behind control tokens too.
            rules = {name: values[name] for name in ("normalizer", "pre_tokenizer")}
            self._first_only = _without_prefix(rules)
            self._bare = type(self._tokenizer).from_str(json.dumps(values | rules))
            self._bare.encode_special_tokens = True
        prefixed = after == "start" or (after == "control" and not self._first_only)
        return self._encoded(self._tokenizer if prefixed else self._bare, text)

    def piece(self, token: int) -> str:
        text: Any = self._tokenizer.id_to_token(token)
        return text

    def control_tokens(self) -> dict[str, ControlToken]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token.content: ControlToken(i, token.lstrip, token.rstrip) for i, token in added if token.special}

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


class _SentencePiece:
    """A SentencePiece model."""

    def __init__(self, path: Path, bos: str | None, eos: str | None) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model ({error}); set data.tokenizer to one, or to a tokenizer.json"
            ) from error
        self._bare: Any = None
        self.vocab_size = self._model.get_piece_size()
        own_bos, own_eos = self._model.bos_id(), self._model.eos_id()
        named_bos = _piece_id(self._lookup, bos, BOS_NAMES, "bos", path)
        named_eos = _piece_id(self._lookup, eos, EOS_NAMES, "eos", path)
        self.bos_id = own_bos if bos is None and own_bos >= 0 else named_bos
        self.unk_id = self._model.unk_id()
        self.eos_id = own_eos if eos is None and own_eos >= 0 else named_eos

    def _lookup(self, piece: str) -> int | None:
        # An unknown piece gets the id of <unk>, which is itself a legal answer for "<unk>".
        token = self._model.piece_to_id(piece)
        return token if self._model.id_to_piece(token) == piece else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, out_type=int)

    def encode_part(self, text: str, after: After) -> list[int]:
        if after != "text":
            return self.encode(text)
        if self._bare is None:
            self._bare = type(self._model)(model_proto=self._model.serialized_model_proto() + _SPACES_AS_THEY_ARE)
        return self._bare.encode(text, out_type=int)

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)

    def control_tokens(self) -> dict[str, ControlToken]:
        return {self.piece(i): ControlToken(i) for i in range(self.vocab_size) if self._model.is_control(i)}

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)
