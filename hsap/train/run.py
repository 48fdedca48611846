"""Run: the training loop of one rank."""

from __future__ import annotations

import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import MicroBatch
from hsap.data.document import NO_TARGET
from hsap.data.loader import StepLoader, eval_packing
from hsap.data.packing import count_long
from hsap.ir.mask import distinct_masks
from hsap.ir.plan import Plan
from hsap.ir.problem import arena_capacity
from hsap.ir.span import positions
from hsap.planners import PLANNERS
from hsap.runtime.attention import PlannedAttention
from hsap.runtime.executor import Session
from hsap.runtime.groups import job_store
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.ranges import Nvtx
from hsap.runtime.sharded import ShardedAttention
from hsap.runtime.upload import Upload
from hsap.train.capacity import Capacity
from hsap.train.checkpoints.saver import Saver, load
from hsap.train.compiling import PlanFigures
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine, build, join, learning_rate, leave
from hsap.train.evaluation import Evaluation
from hsap.train.inputs import Inputs, kernel_options, planning_setup, read_inputs
from hsap.train.leak import check_leak
from hsap.train.metrics import MetricsLog, ratio
from hsap.train.planning import PlanExchange, PlannedStep, PlannedSteps
from hsap.train.pool import PlanPool
from hsap.train.profile import Profile
from hsap.train.settings import keep
from hsap.train.stopping import StopRequest
from hsap.train.tsp.planning import ShardExchange, ShardPlans, Variants


def run(config: TrainConfig, settings: str | None = None) -> None:
    """Train as configured: every rank of the job calls this. ValueError for what the user can mend.

    settings: the configuration as text, to be kept in the run's folder once nothing speaks against the run.
    After an error the process groups are left as they are: the process is about to end, and leaving a group in order
    may wait for ranks that no longer answer.
    """
    inputs = read_inputs(config)
    mesh = join(config)
    engine = build(config, inputs.model, mesh)
    trainer = Trainer(config, inputs, engine)
    if settings is not None and dist.get_rank() == 0:
        keep(Path(config.out), settings)
    with trainer.stop_request:
        trainer.train()
        leave(engine)


class Trainer:
    """One rank's loop over planned steps."""

    def __init__(self, config: TrainConfig, inputs: Inputs, engine: Engine) -> None:
        self.config, self.inputs, self.engine = config, inputs, engine
        self.mesh = engine.mesh
        dtype = TORCH_DTYPES[config.engine.dtype]
        self.session = Session(self.mesh.sp, config.kernel, engine.device, dtype, **kernel_options(config))
        self.session.ranges = Nvtx() if config.profile.nvtx else None
        self.setup = planning_setup(config, inputs.model, self.mesh.dp_rank)
        self.variants = Variants.of(self.setup, inputs.model, config)
        layer_masks = distinct_masks(inputs.model.layer_masks)[1]
        if config.parallel == "tsp":
            self.attention = ShardedAttention(self.session, self.variants.of_shard, layer_masks)
        else:
            self.attention = PlannedAttention(layer_masks)
        # Once, for the largest micro-batch there can be (HSAP §3.4): memory then doesn't jitter with the packs.
        self.capacity = Capacity.of(config.packing, config.train.micro_packs, self.mesh.topology.num_ranks)
        self.session.arena.reserve(max(arena_capacity(s.problem, self.capacity.even) for s in self.variants.setups))
        # Before anything is trained: the processes load their code meanwhile.
        workers = config.data.workers
        self.pools = [PlanPool(setup, workers) if workers else None for setup in self.variants.setups]
        self.evaluation: Evaluation | None = None
        if inputs.eval_data is not None:
            self.evaluation = Evaluation(config, inputs.eval_data, engine, partial(self.exchange, "eval"), self.loss)
        self.stop_request = StopRequest()
        self.stopped_by: signal.Signals | None = None  # as all ranks agree

    def train(self) -> None:
        """Train to the last step, evaluating and saving on the way."""
        config = self.config
        state = {"step": 0, "cursor": None}
        if self.inputs.checkpoint is not None:
            state = self.inputs.checkpoint
            load(self.engine, config, state)
        saver = Saver(config, self.inputs.identity)
        log, out = None, Path(config.out)
        profile = Profile(config.profile, out, self.session, dist.get_rank(), self.mesh.dp_rank, state["step"])
        if dist.get_rank() == 0:
            print(*self._opening(state["step"]), sep="\n", file=sys.stderr, flush=True)
            log = MetricsLog(out, config.train.steps, state["step"], config.train.tensorboard, config.train.log_every)
        loader, steps = self.steps(max(config.train.steps - state["step"], 0), state["cursor"])
        try:
            for step in steps:
                if config.check.leak and step.batch.step == state["step"] + 1:
                    self._check_leak(step)
                figures = self._step(step, (steps.data_wait_s, steps.plan_wait_s), profile)
                # Before the checkpoint: what a crash leaves beyond the newest one is cut off, a gap would stay.
                if log is not None:
                    log.write(figures)
                if self._saves(step.batch.step):
                    saver.save(self.engine, step.batch.step, step.batch.cursor)
                if self.stopped_by is not None:
                    break
            saver.wait()
        finally:
            steps.close()
            loader.close()
            self.close()
            if log is not None:
                log.close()
        if self.stopped_by is not None and dist.get_rank() == 0:
            told = f"stopped after step {step.batch.step}, which is saved; resume=true out={config.out} goes on"
            print(f"hsap: {self.stopped_by.name}: {told}", file=sys.stderr, flush=True)

    def steps(self, count: int, cursor: dict | None = None) -> tuple[StepLoader, PlannedSteps]:
        """So many steps, planned ahead, those behind the cursor or the first ones; both are to be closed, these first.

        Exactly as many: beyond the last one, a rank might wait for a plan that nobody makes any more.
        """
        config = self.config
        loader = StepLoader(
            self.inputs.train_data,
            config.packing,
            packs_per_step=config.train.packs_per_step,
            micro_packs=config.train.micro_packs,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            seed=config.train.seed,
            lookahead=config.data.lookahead,
            cursor=cursor,
        )
        return loader, PlannedSteps(islice(loader, count), self.exchange("train"), config.data.lookahead)

    def close(self) -> None:
        """End the processes that plan."""
        for pool in filter(None, self.pools):
            pool.close()

    def _check_leak(self, step: PlannedStep) -> None:
        reports = check_leak(self, step)
        for report in reports:
            report.check()
        if dist.get_rank() == 0:
            print(f"hsap: {reports[0]}", file=sys.stderr, flush=True)

    def _saves(self, step: int) -> bool:
        """Tell whether a checkpoint of this step is due: every so many, at the end, and wherever a signal stops.

        A run that goes on from a checkpoint saves its last step whatever is set: what it adds would be lost else.
        """
        train = self.config.train
        if self.stopped_by is not None or (train.save_every and step % train.save_every == 0):
            return True
        return step >= train.steps and self._saves_at_end

    @property
    def _saves_at_end(self) -> bool:
        return self.config.train.save_every > 0 or self.inputs.checkpoint is not None

    def _opening(self, step: int) -> list[str]:
        """One line on what is about to run, where it goes and whether it stays; one for documents not packed whole."""
        config, model = self.config, self.inputs.model
        told = (
            f"hsap: {dist.get_world_size()} ranks on {config.engine.device} ({config.topology}, dp {config.dp}), "
            f"planner {config.planner.name}, {model.num_params:,} parameters, writing to {config.out}"
        )
        if step == config.train.steps:
            return [f"{told}; step {step} is the last: raise train.steps to go on"]
        if not self._saves_at_end:
            told += "; the trained model isn't kept: train.save_every=N saves it every N steps and at the end"
        lines = [f"{told}; going on after step {step}" if step else told]
        lines += [f"hsap: {told}" for told in (*self.inputs.left_out, *self.inputs.notices)]
        packed = (
            ("documents", self.inputs.train_data, config.packing, self.inputs.chats),
            ("held-out documents", self.inputs.eval_data, eval_packing(config.packing), None),
        )
        for name, data, packing, chats in packed:
            long = count_long(data.lengths, data.uncut, packing, chats) if data is not None else ()
            lines += [f"hsap: of {len(data.ids):,} {name}, {counts}" for counts in long if str(counts)]
        return lines

    def exchange(self, use: str) -> PlanExchange | ShardExchange:
        """Plans of micro-batches of one use, which has a name of its own."""
        store = job_store() if self.mesh.topology.num_ranks > 1 else None
        place = self.mesh.sp_rank, self.mesh.topology.num_ranks
        exchanges = [
            PlanExchange(store, f"{use}/{self.mesh.dp_rank}/{variant}", *place, setup, pool)
            for variant, (setup, pool) in enumerate(zip(self.variants.setups, self.pools))
        ]
        return ShardExchange(exchanges, self.variants.of_shard) if self.config.parallel == "tsp" else exchanges[0]

    def _step(self, step: PlannedStep, waits: tuple[float, float], profile: Profile) -> dict:
        """One step and the evaluation that is due after it; returns the step's figures."""
        number, train = step.batch.step, self.config.train
        profile.begin(number)
        figures = self.update(step, waits)
        profile.end(number, step.plans)
        if self.evaluation is not None and (number % train.eval_every == 0 or number >= train.steps):
            figures["eval_loss"] = self.evaluation.loss()
        return figures

    def update(self, step: PlannedStep, waits: tuple[float, float]) -> dict:
        """One optimizer update; returns the step's figures."""
        begin, sent = time.perf_counter(), self.engine.weight_bytes
        batch, config = step.batch, self.config
        self._agree(step)
        for group in self.engine.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, batch.step, config.train.steps)
        # Gradients are averaged and divided by accumulation; the loss is a mean over all targets.
        scale = self.engine.num_averaged * config.accumulation / max(batch.global_num_targets, 1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for i, (micro, plan) in enumerate(zip(batch.micro_batches, step.plans)):
            if self.session.recorder is not None:
                self.session.recorder.micro = i
            loss = self.loss(micro, plan)
            loss_sum += loss.detach()
            self.engine.backward(loss * scale)
        local_loss = float(loss_sum)  # waits for the device, so that the clock is read after the work
        busy_s = time.perf_counter() - begin
        return self._figures(step, (local_loss, self.engine.weight_bytes - sent), waits, busy_s)

    def loss(self, micro: MicroBatch, plan: Plan | ShardPlans, model: Callable | None = None) -> Tensor:
        """Sum of the token losses of this rank's rows of a micro-batch. Only these rows come to the device.

        model: what computes it; None: DeepSpeed's engine.
        """
        rows = positions(plan.rank_spans(self.mesh.sp_rank))
        num_rows = self.capacity.padded(len(rows)) if self.config.train.pad_rows else len(rows)
        if isinstance(plan, ShardPlans):
            self.attention.load(plan.plans)
        else:
            self.attention.load(self.session.load(plan), num_rows)
        padding, upload = (0, num_rows - len(rows)), Upload(self.engine.device)
        fields = [
            upload.put(np.pad(field[rows], padding, constant_values=value))
            for field, value in ((micro.tokens, 0), (micro.positions, 0), (micro.labels, NO_TARGET))
        ]
        upload.flush()
        tokens, places, targets = (field.long() for field in fields)
        return (model or self.engine.deepspeed)(tokens, places, self.attention, targets)

    def _agree(self, step: PlannedStep) -> None:
        """Check that all ranks of the SP group run the same plans and together hold every target token.

        One small all-reduce. Equal hashes h are recognised by n · Σh² = (Σh)², which holds only if all are equal.
        """
        mine = 0
        digest = 0
        for micro, plan in zip(step.batch.micro_batches, step.plans):
            rows = positions(plan.rank_spans(self.mesh.sp_rank))
            mine += int((micro.labels[rows] != NO_TARGET).sum())
            digest = (digest * 31 + int(plan.hash[:6], 16)) % (1 << 24)
        totals = torch.tensor([mine, digest, digest * digest], dtype=torch.int64, device=self.engine.device)
        dist.all_reduce(totals, group=self.mesh.sp)
        targets, hashes, squares = totals.tolist()
        expected = sum(micro.num_targets for micro in step.batch.micro_batches)
        if self.mesh.topology.num_ranks * squares != hashes * hashes or targets != expected:
            raise RuntimeError(
                f"step {step.batch.step}: the ranks of SP group {self.mesh.dp_rank} disagree: rank {self.mesh.sp_rank} "
                f"has plan digest {digest:06x}, and together they hold {targets} of {expected} target tokens"
            )

    def _figures(self, step: PlannedStep, local: tuple[float, int], waits: tuple[float, float], busy_s: float) -> dict:
        """Figures of a step over all ranks; times are the slowest rank's. local: this rank's loss and weight_bytes."""
        batch, promised = step.batch, astuple(step.figures)
        plans = step.plans if self.mesh.sp_rank == 0 else ()  # each SP group's once
        chosen = [sum(plan.planner == name for plan in plans) for name in PLANNERS]
        sums = torch.tensor([*local, *promised, *chosen], dtype=torch.float64, device=self.engine.device)
        # A rank's whole time, not the sum of three maxima: while one waits for data, the others wait for it.
        elapsed_s = sum(waits) + busy_s
        # A signal may have reached only some of the ranks.
        highest = [*waits, elapsed_s, _peak_bytes(self.engine.device), self.stop_request.asked_by or 0]
        highest = torch.tensor(highest, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(sums)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        loss, weight_bytes, *totals = sums.tolist()
        if not math.isfinite(loss):
            raise ValueError(
                f"step {batch.step}: the loss is {loss}; training has diverged. Lower optim.lr, lengthen "
                "optim.warmup_steps or set optim.clip, and start anew or from the newest checkpoint (resume=true)"
            )
        figures, chosen = PlanFigures(*totals[: len(promised)]), totals[len(promised) :]
        data_wait_s, plan_wait_s, step_s, peak_bytes, asked_by = highest.tolist()
        self.stopped_by = signal.Signals(int(asked_by)) if asked_by else None
        flops = self.inputs.model.train_flops(batch.num_tokens, figures.area)
        ranks = dist.get_world_size()
        return {
            "step": batch.step,
            "epoch": batch.epoch,
            "loss": ratio(loss, batch.global_num_targets),
            "grad_norm": self.engine.grad_norm(),
            "lr": learning_rate(self.config.optim, batch.step, self.config.train.steps),
            "tokens": batch.num_tokens,
            "target_tokens": batch.global_num_targets,
            "tokens_per_s": batch.num_tokens / step_s,
            "tokens_per_s_per_rank": batch.num_tokens / step_s / ranks,
            "mfu": flops / step_s / (self.setup.problem.cluster.flops_per_s * ranks),
            "padding_share": batch.padding_share,
            "pack_tokens": batch.pack_tokens,
            "planners": {name: int(count) for name, count in zip(PLANNERS, chosen) if count},
            "area_imbalance": ratio(figures.max_area, figures.mean_area),
            "token_imbalance": ratio(figures.max_tokens, figures.mean_tokens),
            "intra_node_bytes": int(figures.intra_node_bytes),
            "inter_node_bytes": int(figures.inter_node_bytes),
            "weight_bytes": int(weight_bytes),
            "plan_wait_s": plan_wait_s,
            "data_wait_s": data_wait_s,
            "step_s": step_s,
            "peak_memory_bytes": int(peak_bytes),
            "doc_ids_hash": batch.doc_ids_hash,
        } | _choices(step.plans)


def _choices(plans: tuple[Plan, ...]) -> dict:
    """What planner auto chose between, for each micro-batch: predicted seconds by candidate, None for one without."""
    made = [plan.choice for plan in plans if plan.choice is not None]
    table = [{name: None if isinstance(s, str) else s for name, s in choice.items()} for choice in made]
    return {"choice": table} if table else {}


def _peak_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
