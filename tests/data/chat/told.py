"""What a sample says, told in runs of tokens; conversations written shortly, and a tokenizer of single bytes."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hsap.data.document import Conversation, Turn

CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(*turns, tools=(), **more) -> Conversation:
    """("u", "hi"), ("a", "hello", 0.0): a letter of the role, content, weight."""
    return Conversation(tuple(Turn(ROLES[role], *said, **more) for role, *said in turns), tools)


def told(tokenizer, tokens, trained) -> list[tuple[str | list[str], bool]]:
    """Runs of text, and control tokens one by one as a list of one, each with whether it is trained."""
    controls = {token.id: piece for piece, token in tokenizer.control_tokens.items()}
    runs, ids = [], []
    for token, mark in zip(tokens.tolist(), trained.tolist(), strict=True):
        if token in controls:
            runs.append(([controls[token]], mark))
        elif runs and isinstance(runs[-1][0], str) and runs[-1][1] == mark:
            ids.append(token)
            runs[-1] = (tokenizer.decode(ids), mark)
        else:
            ids = [token]
            runs.append((tokenizer.decode(ids), mark))
    return runs


def joined(parts) -> list[tuple[str | list[str], bool]]:
    """Join runs of text that are trained alike, and leave out empty ones."""
    runs = []
    for text, mark in parts:
        if text == "":
            continue
        if runs and isinstance(text, str) and isinstance(runs[-1][0], str) and runs[-1][1] == mark:
            runs[-1] = (runs[-1][0] + text, mark)
        else:
            runs.append((text, mark))
    return runs


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
