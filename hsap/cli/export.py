"""`hsap export`: a folder in Hugging Face's form from a checkpoint of a run."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from hsap.cli.exit import OK
from hsap.ir.check import whole

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BESIDE = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
"""What belongs to a model and changes by no training."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "export",
        help="make a Hugging Face folder from a checkpoint of a run",
        description="Make a Hugging Face folder from a checkpoint of a run, by default the newest.",
    )
    command.add_argument("checkpoint", metavar="RUN|CHECKPOINT", help="a run's folder, or one checkpoint's")
    command.add_argument("-o", "--out", required=True, metavar="FOLDER", help="the folder to make")
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights; training keeps them in fp32")
    command.add_argument(
        "--like", metavar="FOLDER", help="take tokenizer, ids of special tokens and the like from this model's folder"
    )
    command.add_argument(
        "--max-positions", type=int, metavar="N", help="longest document it is for (default: --like's, or a pack)"
    )
    command.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    import torch

    from hsap.models.huggingface import read_config, write
    from hsap.train.checkpoints.export import Exported

    source = Exported.open(Path(arguments.checkpoint))
    like, positions = None, arguments.max_positions
    if positions is not None:
        positions = whole("--max-positions", positions, 1)
    if arguments.like is not None:
        like = read_config(arguments.like)[1]
    elif positions is None:
        positions = source.pack_tokens
    dtype = getattr(torch, DTYPES[arguments.dtype])
    write(arguments.out, source.config, source.parameter, dtype, max_positions=positions, like=like)
    copied = [name for name in BESIDE if arguments.like and (Path(arguments.like) / name).is_file()]
    for name in copied:
        shutil.copyfile(Path(arguments.like) / name, Path(arguments.out) / name)
    beside = f", {', '.join(copied)}" if copied else ""
    print(f"{arguments.out}: {source.config.num_params:,} parameters of step {source.step}, {arguments.dtype}{beside}")
    return OK
