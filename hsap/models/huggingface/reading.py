"""From config.json to `ModelConfig`: every field is understood, known to mean nothing here, or refused by its name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hsap.keys import is_integer, is_number
from hsap.models.config import FREE, ModelConfig
from hsap.models.huggingface.families import COMMON, FAMILIES, NOTES, ONLY, SIZES, Family

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPING = (*SIZES, "num_kv_heads", "head_dim", "tied_embeddings", "attention_bias", "qk_norm")
"""Fields of `ModelConfig` that tensors' names and shapes follow from."""
ROPE_NUMBERS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original_tokens": "original_max_position_embeddings",
    },
}
"""Kinds of rope scaling, and what their numbers are called in a config.json."""


def read_config(folder: str | Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Read the model's shape from FOLDER/config.json; gives the file's own fields, too.

    ValueError: a file that is missing or isn't JSON, and, by its name, a field that is missing, has a value it can't
    have, or means something that this decoder doesn't compute.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{path} isn't there: give a folder that holds config.json and model.safetensors, as Hugging Face saves one"
        )
    raw = read_json(path)
    return model_config(raw, str(path)), raw


def configured(section: Mapping[str, Any], tokenizer_vocab_size: int | None) -> tuple[ModelConfig, tuple[str, ...]]:
    """Make the config of a `model` group whose key `from` names a folder.

    Keys beside `from` hold over what the folder says, unless tensors' shapes follow from them: then both must agree.
    Gives the config, and what it changes of the folder's, in words. ValueError, as of `read_config`, and for keys.
    """
    folder = section["from"]
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"model.from={folder}: expected a folder that holds config.json and model.safetensors")
    own = dataclasses.asdict(read_config(folder)[0])
    asked = {name: value for name, value in section.items() if name != "from" and value is not None}
    for name in SHAPING:
        if name in asked and asked[name] != own[name]:
            raise ValueError(
                f"model.{name}={asked[name]}, but {own[name]} in {folder}, where model.from takes the weights from: "
                "leave it out (model=huggingface sets none of them), or start from another folder"
            )
    config = ModelConfig.from_mapping(own | asked, tokenizer_vocab_size)
    changed = {name: value for name, value in dataclasses.asdict(config).items() if value != own[name]}
    # What these do isn't what the model computes, and no folder says it.
    told = [name for name in changed if name not in (*FREE, "init_std")]
    return config, tuple(f"model.{name}={changed[name]} in place of {own[name]}, as {folder} has it" for name in told)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError where the file holds none."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read ({error}); copy it anew from where it is whole") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object; copy it anew from where it is whole")
    return values


def model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Make the config that a config.json's fields describe; where: how messages call the file."""
    family = _family(raw, where)
    fields = _Fields({**COMMON, **family.defaults, **raw}, where)
    values: dict[str, Any] = {ours: fields.whole(theirs) for ours, theirs in SIZES.items()}
    heads = values["num_q_heads"]
    # Only Llama's own default is a rule; the other families' are figures of their first models.
    values["num_kv_heads"] = fields.whole("num_key_value_heads", heads if raw.get("model_type") == "llama" else None)
    head_dim, rest = divmod(values["hidden_dim"], heads)
    values["head_dim"] = fields.whole("head_dim", None if rest else head_dim)
    values["norm_eps"] = fields.number("rms_norm_eps")
    values["init_std"] = fields.number("initializer_range")
    values["tied_embeddings"] = fields.flag("tie_word_embeddings")
    bias = family.bias
    values["attention_bias"] = bias or ("all" if fields.flag("attention_bias") else "none")
    values["qk_norm"] = family.qk_norm
    values["rope_base"], values["rope_scaling"] = _rope(fields)
    values["masks"] = _masks(fields, family, values["num_layers"])
    fields.close()
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class _Fields:
    """The fields of one config.json, each taken once; what is left over at the end is refused."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._left, self.where = dict(values), where

    def take(self, name: str) -> Any:
        """Take a field as it is, None where there is none."""
        return self._left.pop(name, None)

    def refuse(self, name: str, value: object, expected: str) -> NoReturn:
        raise ValueError(f"{self.where}: {name} is {json.dumps(value)}: expected {expected}")

    def whole(self, name: str, otherwise: int | None = None) -> int:
        value = self.take(name)
        value = otherwise if value is None else value
        if not is_integer(value) or not 1 <= value < 1 << 31:
            self.refuse(name, value, "a whole number of at least 1, below 2^31")
        return value

    def number(self, name: str) -> float:
        value = self.take(name)
        if not is_number(value) or value <= 0:
            self.refuse(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def close(self) -> None:
        """Refuse what no rule has taken, unless it is known to mean nothing here, or says that something is off."""
        for name, value in self._left.items():
            if name in NOTES or (name in ONLY and value in ONLY[name]) or (name not in ONLY and value in (None, False)):
                continue
            raise ValueError(
                f"{self.where}: {name} is {json.dumps(value)}, which this decoder doesn't implement, so it would "
                "compute something else than the model; if the field has no effect on that, take it out of the file"
            )


def _family(raw: Mapping[str, Any], where: str) -> Family:
    name = raw.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ValueError(f"{where}: model_type is {json.dumps(name)}: expected one of {', '.join(FAMILIES)}")
    architectures = raw.get("architectures")
    if architectures not in (None, [family.architecture]):
        raise ValueError(
            f"{where}: architectures is {json.dumps(architectures)}: expected {family.architecture}, a language model"
        )
    return family


def _rope(fields: _Fields) -> tuple[float, str]:
    """Base and scaling of rotary embedding, from `rope_theta` and `rope_scaling` or, since transformers 5,
    `rope_parameters`."""
    given = {name: fields.take(name) for name in ("rope_parameters", "rope_scaling")}
    theta = fields.take("rope_theta")
    sections = [(name, value) for name, value in given.items() if value is not None]
    if len(sections) > 1 and sections[0][1] != sections[1][1]:
        raise ValueError(f"{fields.where}: rope_parameters and rope_scaling both say something; take one of them out")
    name, section = sections[0] if sections else ("rope_scaling", {})
    if not isinstance(section, dict):
        fields.refuse(name, section, "an object with rope_type, or null")
    inner = _Fields(section, f"{fields.where}: {name}")
    told = [kind for kind in (inner.take("rope_type"), inner.take("type")) if kind is not None]
    kinds = told[:1] if told[:1] == told[1:] else told
    if len(kinds) > 1 or any(kind not in ("default", *ROPE_NUMBERS) for kind in kinds):
        fields.refuse(name, section, f"rope_type to be one of default, {', '.join(ROPE_NUMBERS)}")
    kind = kinds.pop() if kinds else "default"
    if section and not {"rope_type", "type"} & set(section) and set(section) != {"rope_theta"}:
        fields.refuse(name, section, "an object with rope_type, or null")
    base = inner.number("rope_theta") if "rope_theta" in section else theta
    if not is_number(base) or base <= 0:
        fields.refuse("rope_theta", base, "a number above 0")
    text = "none"
    if kind != "default":
        text = f"{kind}:{','.join(repr(inner.number(theirs)) for theirs in ROPE_NUMBERS[kind].values())}"
    inner.close()
    return float(base), text


def _masks(fields: _Fields, family: Family, num_layers: int) -> list[str]:
    """The mask of each layer; a sliding window counts the query's own key, as ours does."""
    if family.windows == "never":
        return ["causal"]
    by_layer = family.windows == "by layer"
    used = fields.flag("use_sliding_window") if by_layer else True
    window, first, types = (fields.take(name) for name in ("sliding_window", "max_window_layers", "layer_types"))
    used = used and (by_layer or window is not None)
    if types is None:
        if used and by_layer and (not is_integer(first) or first < 0):
            fields.refuse("max_window_layers", first, "a whole number of at least 0")
        types = [SLIDING if used and (not by_layer or i >= first) else FULL for i in range(num_layers)]
    elif not by_layer:
        fields.refuse("layer_types", types, f"none, as {family.architecture} has no such field")
    if not isinstance(types, list) or len(types) != num_layers or any(one not in (FULL, SLIDING) for one in types):
        fields.refuse("layer_types", types, f"{FULL} or {SLIDING} for each of the {num_layers} layers")
    if SLIDING not in types:
        return ["causal"]
    if not used:
        fields.refuse("use_sliding_window", False, f"true, as layer_types names {SLIDING}")
    if not is_integer(window) or window < 1:
        fields.refuse("sliding_window", window, "a whole number of at least 1")
    return [f"window:{window}" if one == SLIDING else "causal" for one in types]
