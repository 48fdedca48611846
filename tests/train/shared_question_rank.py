"""One rank that trains on shared questions, or on a sequence for each answer, as the run's directory is named."""

import dataclasses
from pathlib import Path

import numpy as np

from hsap.data.chat.shared_question import join
from hsap.data.document import Sample
from hsap.data.store import DocumentStore
from hsap.train.config import TrainConfig
from hsap.train.inputs import Inputs, read_inputs
from tests.parity.rank import main

SHAPES = [(40, [12, 30, 7]), (1, [9, 5]), (23, [1, 17, 17, 4]), (64, [20, 31])]


def samples(shared: bool) -> list[Sample]:
    """Questions with answers, and an ordinary document."""
    rng, made = np.random.default_rng(5), [Sample("plain", np.arange(3, 50, dtype=np.int32))]
    for i, (question, answers) in enumerate(SHAPES):
        tokens = [rng.integers(2, 512, n).astype(np.int32) for n in (question, *answers)]
        marks = [rng.random(n) < 0.7 for n in (question, *answers)]
        if shared:
            made.append(join(str(i), tokens[0], tokens[1:], marks[0], marks[1:]))
            continue
        for j, (answer, trained) in enumerate(zip(tokens[1:], marks[1:])):
            known = marks[0] & (j == 0)  # the question's targets count once
            made.append(Sample(f"{i}.{j}", np.append(tokens[0], answer), np.append(known, trained)))
    return made


def read(config: TrainConfig) -> Inputs:
    store = DocumentStore.from_samples(samples(Path(config.out).name == "shared"))
    return dataclasses.replace(read_inputs(config), train_data=store)


def train(runs: list[list[str]], _: int) -> None:
    main(runs, read)
