"""Hugging Face's Trainer under sequence parallelism.

Trainer's own loss fits, with every rank's targets counted: it divides each rank's sum by all targets of the step and
multiplies by the number of ranks, over which gradients are then averaged. What it has no idea of is that the ranks of
an SP group share their data, so data loaders are made here; what would break the count is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from hsap.integrations.own_loop import SequenceParallel
from hsap.integrations.transformers import Collator
from hsap.targets import NO_TARGET

try:
    from transformers import Trainer
    from transformers.training_args import TrainingArguments
    from transformers.utils.versions import require_version

    # Older ones don't tell a loader the epoch in which a run goes on, which then has another order of documents.
    require_version("transformers>=5.20")
except ImportError as error:
    raise ImportError(
        f"hsap.integrations.trainer needs transformers and accelerate: pip install 'hsap[transformers]' ({error})"
    ) from error

_MUST_BE = {
    "average_tokens_across_devices": (True, "else a rank divides by its own targets"),
    "label_smoothing_factor": (0.0, "the loss is computed without logits"),
    "dataloader_num_workers": (0, "batches are planned where all ranks of a group meet; plan ahead by workers="),
    "use_liger_kernel": (False, "it replaces the loss"),
    "batch_eval_metrics": (False, "there are no logits"),
    "include_for_metrics": ([], "there are no logits"),
    "full_determinism": (False, "it sets flags for the whole process that attention's kernels don't know"),
    "auto_find_batch_size": (False, "a rank alone would take another size"),
    "neftune_noise_alpha": (None, "its noise depends on how many tokens are embedded together, and ranks have some"),
}
"""Arguments that another value of would change the loss behind our back, or make ranks part ways, and why."""


class SequenceParallelTrainer(Trainer):  # type: ignore[misc]  # it may not be installed
    """Trainer for a model that `sequence_parallel` has prepared.

    sequence_parallel: what that gave. A feature is a document (see `Collator`, the default `data_collator`), a batch
    the documents of one micro-batch of an SP group, so per_device_train_batch_size counts documents per SP group; they
    are drawn in an order that depends on the seed alone, or as they come with train_sampling_strategy="sequential".
    Evaluation and prediction give the loss only, the mean over all targets of the data set; over SP groups that don't
    divide the documents evenly some count twice. Errors: ValueError for arguments that don't fit.
    """

    def __init__(self, *args: Any, sequence_parallel: SequenceParallel, **kwargs: Any) -> None:
        self.sequence_parallel = sequence_parallel
        kwargs.setdefault("data_collator", Collator(sequence_parallel))
        super().__init__(*args, **kwargs)
        check_arguments(self.args)
        if self.compute_loss_func is not None or self.compute_metrics is not None:
            raise ValueError(
                "trainer: compute_loss_func and compute_metrics work on logits of whole sequences, which no rank has; "
                "leave them out"
            )
        self.args.prediction_loss_only = True

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Documents of this rank's SP group."""
        shuffle = self.args.train_sampling_strategy != "sequential"
        return self._documents(self.train_dataset, self._train_batch_size, shuffle, self.args.dataloader_drop_last)

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Held-out documents of this rank's SP group."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data
        return self._documents(data, self.args.eval_batch_size, shuffle=False, drop_last=False)

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> DataLoader[Any]:
        """Documents to predict, of this rank's SP group."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, but for the loss: Trainer's is a mean of batches' means, whatever the batches hold."""
        self._evaluated = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        output = super().evaluation_loop(*args, **kwargs)
        loss_sum, count = self.accelerator.reduce(self._evaluated, reduction="sum").tolist()
        for name in output.metrics:
            if name.endswith("_loss"):
                output.metrics[name] = loss_sum / max(count, 1)
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None, None]:
        """Add this rank's losses and targets of a batch to what is evaluated."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss = model(**inputs, loss_scale=1.0).loss
        self._evaluated += torch.stack((loss.double(), (inputs["shift_labels"] != NO_TARGET).sum().double()))
        return loss, None, None

    def _documents(self, data: Any, batch_size: int, shuffle: bool, drop_last: bool) -> DataLoader[Any]:
        if data is None or not hasattr(data, "__len__"):
            raise ValueError(
                "trainer: the dataset has no length; give one of documents that can be counted and indexed, so that "
                "SP groups can share them"
            )
        sp, seed = self.sequence_parallel, self.args.data_seed if self.args.data_seed is not None else self.args.seed
        sampler: DistributedSampler[Any] = DistributedSampler(data, sp.dp_size, sp.dp_rank, shuffle, seed)
        return _Documents(data, batch_sampler=_Batches(sampler, batch_size, drop_last), collate_fn=self.data_collator)


class _Batches(BatchSampler):
    """Batches of a sampler that is told the epoch; by this name Trainer finds it in a run that goes on."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.sampler
        sampler.set_epoch(epoch)


class _Documents(DataLoader[Any]):
    """A loader that is told the epoch, without which every epoch would have the order of the first."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


def check_arguments(arguments: TrainingArguments) -> None:
    """Refuse arguments that Trainer would compute another loss with than the mean over all targets of all ranks."""
    for name, (value, reason) in _MUST_BE.items():
        given = getattr(arguments, name, value)
        if given != value:
            raise ValueError(f"trainer: {name}={given!r}: {reason}; set {name}={value!r}")
    if (sampling := arguments.train_sampling_strategy) not in ("random", "sequential"):
        raise ValueError(
            f"trainer: train_sampling_strategy={sampling!r} deals documents to ranks by length, which plans "
            "balance here already; set it to 'random' or 'sequential'"
        )
    if arguments.n_gpu > 1:
        raise ValueError("trainer: this process has several GPUs; start one process for each, with torchrun")
    if getattr(arguments, "parallelism_config", None) is not None:
        raise ValueError("trainer: parallelism_config shares out ranks that are HSAP's already; leave it out")
