"""From `ModelConfig` to config.json: the family that computes the same, in fields that transformers of any age read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsap.ir.mask import Mask
from hsap.models.config import ModelConfig
from hsap.models.huggingface.families import FAMILIES, NOTES, SIZES, Family
from hsap.models.huggingface.reading import FULL, ROPE_NUMBERS, SLIDING
from hsap.models.scaling import RopeScaling

_OF_THE_RUN = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


def config_json(
    config: ModelConfig, dtype: str, max_positions: int | None = None, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Give the fields of the config.json of a model.

    dtype: torch's name of the tensors' type. like: fields of the config.json it was made from; its family is kept where
    it has room for this model, and so are notes (ids of special tokens, say). max_positions: longest document it is
    meant for; None: as `like` says.
    ValueError: no family has such a model, or nothing says how long its documents are.
    """
    like = like or {}
    if max_positions is None and "max_position_embeddings" not in like:
        raise ValueError("nothing says for how long documents the model is meant: give max_positions")
    layers = config.layer_masks
    windows = {mask for mask in layers if mask != Mask()}
    if len(windows) > 1 or any(mask.name != "window" for mask in windows):
        raise ValueError(
            f"model.masks is {config.masks}, but Hugging Face's families have causal attention and windows of one size "
            "only: save it with model.masks=causal if others shall use it so"
        )
    name = _family(config, layers, like.get("model_type"))
    fields = {
        "architectures": [FAMILIES[name].architecture],
        "model_type": name,
        "max_position_embeddings": max_positions,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_scaling": _rope(RopeScaling.parse(config.rope_scaling)),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if FAMILIES[name].bias is None:
        fields["attention_bias"] = config.attention_bias == "all"
    fields |= _windows(FAMILIES[name], layers)
    notes = {key: value for key, value in like.items() if key in NOTES and key not in _OF_THE_RUN}
    if max_positions is not None:
        notes.pop("max_position_embeddings", None)
    return fields | notes


def _family(config: ModelConfig, layers: tuple[Mask, ...], preferred: str | None) -> str:
    """The family that has this model; if several have, the preferred one, else the first."""
    rooms = {"never": layers == (Mask(),) * len(layers), "all": len(set(layers)) == 1, "by layer": True}
    fitting = [
        name
        for name, family in FAMILIES.items()
        if family.qk_norm == config.qk_norm
        and (config.attention_bias == family.bias if family.bias else config.attention_bias != "qkv")
        and rooms[family.windows]
    ]
    if not fitting:
        raise ValueError(
            f"no family of Hugging Face's that is known here has model.attention_bias={config.attention_bias}, "
            f"model.qk_norm={str(config.qk_norm).lower()} and model.masks={config.masks} together"
        )
    return preferred if preferred in fitting else fitting[0]


def _rope(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    numbers = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_NUMBERS[scaling.kind].items()}
    if scaling.kind == "llama3":
        # transformers warns where this one is no whole number.
        numbers["original_max_position_embeddings"] = int(scaling.original_tokens)
    return {"rope_type": scaling.kind, **numbers}


def _windows(family: Family, layers: tuple[Mask, ...]) -> dict[str, Any]:
    if family.windows == "never":
        return {}
    window = next((mask.parameters[0] for mask in layers if mask != Mask()), None)
    if family.windows == "all":
        return {"sliding_window": window}
    types = [FULL if mask == Mask() else SLIDING for mask in layers]
    # What reads max_window_layers alone is right where windows begin at some layer and never end.
    first = types.index(SLIDING) if SLIDING in types else len(types)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": types,
    }
