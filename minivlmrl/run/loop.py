"""Training loop: run_training > train_stages > train_stage > optimizer_step."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch.optim import Optimizer

from minivlmrl.config.loading import flat
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.rows import Dataset, seed_user_code
from minivlmrl.distributed import process_group
from minivlmrl.distributed.watchdog import hang_watchdog
from minivlmrl.distributed.weights import begin_micro_batch, end_micro_batches, is_sharded
from minivlmrl.errors import UserError, error_phase
from minivlmrl.files import remove_folder
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.lock import locked
from minivlmrl.run.metrics import MetricsLog, check_mismatch, merge
from minivlmrl.run.optimizer import build_optimizer, finish_gradients, learning_rate
from minivlmrl.run.recipe_changes import check_same
from minivlmrl.run.results import BEST, Results, check_output_dir, check_outputs, mark_output_dir
from minivlmrl.run.setup import prepare
from minivlmrl.run.signals import StopSignals
from minivlmrl.run.states import UPDATE, Resumed, StateSaver, load_state, resume
from minivlmrl.trainers.base import MicroBatch, Step, Trainer
from minivlmrl.trainers.registry import find_trainers


def run_training(config: RunConfig, callbacks: Sequence[Callback] | None = None) -> int:
    """Train a recipe in this process, which may be one of several ranks.

    Args:
        callbacks: defaults to `default_callbacks(config)`.
    Returns:
        exit code: 0, or 75 after a stop signal
    """
    callbacks = default_callbacks(config) if callbacks is None else callbacks
    trainers = find_trainers(config)
    check_outputs(config, trainers)
    for callback in callbacks:
        callback.on_recipe(config, trainers)

    signals = StopSignals(
        process_group.setup(config.num_threads, config.timeout, config.uses_fsdp, 3600 * config.max_wait_hours)
    )
    world = signals.world  # a World whose stop_if_preempted raises an error after a stop signal
    with signals, hang_watchdog(world.max_wait, world.size), locked(config.output_dir, world):
        check_same(flat(asdict(config)), world)
        with notify_on_error(callbacks):
            with error_phase("load"):
                model, processor, datasets = prepare(config, trainers, world, callbacks)
            # check output_dir last, because its error message tells users to delete earlier results
            check_output_dir(config)
            if world.is_main:  # mark the folder before any other file is written
                mark_output_dir(config)

        # open the output folder
        resumed = resume(config, datasets, world)
        if world.is_main:  # after all checks, because a rejected recipe writes no files
            hint = "open report.html there in a browser" if callbacks else "no callback watches this run"
            print(f"output: {config.output_dir}; {hint}", flush=True)
        with MetricsLog(config, world, resumed.state) as log:
            saver = StateSaver(config, resumed, signals, log, callbacks)
            with saver.saved_on_error(), notify_on_error(callbacks):
                results = Results(config, model, processor, log, datasets.get("eval"), callbacks)
                train_stages(trainers, datasets, results, saver, resumed)
    process_group.shutdown(world)
    return signals.exit_code


def train_stages(
    trainers: dict[str, type[Trainer]],
    datasets: dict[str, Dataset],
    results: Results,
    saver: StateSaver,
    resumed: Resumed,
):
    """Train all stages, starting at the resumed step, and write the results."""
    config = results.config
    state = results.state
    trainer = None
    for stage in config.stage_names[state.stage :]:
        is_first = trainer is None
        if trainer is not None:
            # save a reward model with all weights, because later stages load it
            trainer.save(results.folder, merge=config.save != "adapter" or not trainer.trains_policy)
            results.world.barrier()  # wait, because the next stage may read the saved files
        seed_user_code(f"{config.seed}/{stage}")  # equal seeds on all ranks, which must start with the same weights
        with error_phase("load"):
            trainer = trainers[stage](
                config, results.model, results.processor, results.world, state.step if is_first else 0
            )
        # change `state` only after the trainer is loaded: if memory runs out, the previous stage can still be saved
        if not is_first:
            saver.trainer = None
            state.stage += 1
            state.step = 0
            state.batches_consumed = 0
        optimizer = build_optimizer(trainer.trained, trainer.options, config.optimizer)
        if is_first and resumed.folder is not None:
            with error_phase("load"):
                load_state(resumed.folder, trainer, optimizer)
            for group, numbers in zip(optimizer.param_groups, state.optimizer, strict=False):
                group.update(numbers)
        saver.trainer = trainer
        saver.optimizer = optimizer
        if is_first:
            begin_run(results, resumed)
        train_stage(trainer, optimizer, datasets[stage], results, saver, resumed.old_end if is_first else None)
    if trainer is None:
        begin_run(results, resumed)
    results.write(trainer)


def begin_run(results: Results, resumed: Resumed):
    """Delete results later than the resumed state; for a new run, evaluate the initial model."""
    log = results.log
    if log.world.is_main:
        newer = [folder for folder in resumed.saved if not resumed.folder or int(folder.name) > results.state.steps]
        for folder in (*newer, *results.folder.glob("states/*.partial")):
            remove_folder(folder)
    log.open_files(resumed.folder)
    # if the user has deleted best/, forget the best evaluation so far
    if not log.world.compute_on_rank_zero((results.folder / BEST).is_dir):
        results.state.best = None
    results.write_config()
    for callback in results.callbacks:
        callback.on_run_begin(results.config, log)
        log.callback(callback.on_run_end)
    log.world.barrier()
    if resumed.folder is None and results.config.eval_on_start:
        results.measure("start")


@contextmanager
def notify_on_error(callbacks: Sequence[Callback]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        for callback in callbacks:
            callback.on_error(error)
        raise


def train_stage(
    trainer: Trainer, optimizer: Optimizer, rows: Dataset, results: Results, saver: StateSaver, old_end: int | None
):
    """Train one stage, from its first step or from a resumed state.

    Args:
        old_end: last step of the stage in the resumed run; if the stage is longer now, evaluate at this step as well.
    """
    stage = trainer.stage
    log = results.log
    state = results.state
    callbacks = results.callbacks
    batches = Batches(rows, trainer, state.batches_consumed)
    steps = trainer.steps(batches)  # a generator: next(steps) samples completions
    for callback in callbacks:
        callback.on_stage_begin(trainer, optimizer, state)
    log.stage(trainer, state.step, state.seconds.get(stage, 0.0))
    for number in range(state.step, trainer.options.max_steps):
        # evaluate only after a state was saved, so a run killed during evaluation loses no step
        if number > 0:
            results.evaluate_if_due(trainer, number, is_due=number == old_end)
        # seed at every step, so a resumed run draws the same random numbers
        key = f"{trainer.config.seed}/{stage}/{number}/{trainer.world.rank}"
        seed_user_code(f"{key}/rollout")
        try:
            with trainer.phase("preparation"):
                step = next(steps)
            for callback in callbacks:
                callback.on_step_begin(trainer, optimizer, step, number, batches)
            seed_user_code(f"{key}/update")  # seed again, because callbacks may have drawn random numbers
            metrics = optimizer_step(trainer, step, optimizer, number)
            saver.signals.can_save = False  # save no state until the step is logged
            for callback in callbacks:
                callback.after_step(trainer, number)
        except FloatingPointError as error:
            raise UserError(
                f"{stage} step {number}: {error}. The run stopped before this update; try a lower {stage}.learning_rate"
            ) from error
        state.step += 1
        state.steps += 1
        state.batches_consumed = batches.batches_consumed
        values = log.step(number, metrics, step)
        for callback in callbacks:
            callback.on_step_end(trainer, step, number, values)
        trainer.world.barrier()
        log.count_lines()
        state.seconds[stage] = log.seconds
        # save a state only between rollouts, because states contain no completions
        saver.signals.can_save = step.ends_rollout or saver.stage_ends
        saver.after_step()
    state.seconds[stage] = log.end_stage()
    results.measure(f"after_{stage}", trainer)


def optimizer_step(trainer: Trainer, step: Step, optimizer: Optimizer, number: int) -> dict[str, float]:
    """Accumulate gradients, update the weights once, and return the metrics.

    Raises:
        FloatingPointError: the loss or the gradient norm is not finite.
        UserError: sampler and trainer compute different log-probabilities.
    """
    metrics = run_micro_batches(trainer, step.micro_batches, number)
    with trainer.phase("update"):
        grad_norm = finish_gradients(trainer.trained, trainer.world, trainer.config.optimizer.max_grad_norm)
    metrics |= step.metrics | {"grad_norm": grad_norm}
    if not math.isfinite(metrics["loss"]) or not math.isfinite(grad_norm):
        raise FloatingPointError(f"the loss {metrics['loss']} or the gradient norm {grad_norm} is not finite")
    check_mismatch(trainer.config, metrics)
    rate = learning_rate(number, trainer.options)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with trainer.phase(UPDATE):
        optimizer.step()
        optimizer.zero_grad()
    return metrics | {"learning_rate": rate}


def run_micro_batches(trainer: Trainer, batches: Sequence[MicroBatch], number: int) -> dict[str, float]:
    """Accumulate gradients over micro-batches, and average metrics over ranks."""
    world = trainer.world
    values = []  # metrics per micro-batch
    counts = []  # token or answer counts per micro-batch
    # whether text has a gradient; if only the vision tower is trained, micro-batches without images have none
    trains_texts = any(p.requires_grad and "visual." not in name for name, p in trainer.trained.named_parameters())

    def has_gradient(batch: MicroBatch) -> bool:
        return trains_texts or len(batch.group.image_grid_thw) > 0

    if world.size > 1 and is_sharded(trainer.trained):
        # Sort micro-batches by length, because FSDP ranks wait for each other in every layer. The last micro-batch
        # must have a gradient, because FSDP may reduce gradients only in the last backward pass.
        batches = sorted(batches, key=lambda batch: (not has_gradient(batch), num_tokens(batch)), reverse=True)
    for index, batch in enumerate(batches):
        world.stop_if_preempted()
        begin_micro_batch(trainer.trained, is_last=index + 1 == len(batches))
        with trainer.dropout(number, index):
            rows = [prompt.row for prompt in batch.group.prompts if prompt.row is not None]
            with trainer.phase("forward", rows):
                loss, metrics = trainer.training_loss(batch)
            with trainer.phase("backward", rows):
                if has_gradient(batch) and not loss.requires_grad:
                    raise UserError(
                        f"{trainer.stage} step {number}: the loss has no gradient, so nothing would be learned. "
                        "Compute it from the log-probabilities without detach() and torch.no_grad()"
                    )
                if loss.requires_grad:  # with FSDP, True even without images, because of DummyVisionForward
                    loss.backward()
        values.append({"loss": loss.detach(), **metrics})
        counts.append(batch.counts(values[-1]))
    end_micro_batches(trainer.trained)
    # copy all metrics from the GPU at once
    numbers = iter(torch.stack([value.detach().double() for part in values for value in part.values()]).tolist())
    parts = [{name: (next(numbers), count[name]) for name in part} for part, count in zip(values, counts, strict=True)]
    return {name: mean for name, (mean, _) in merge(world.gather_objects(merge(parts))).items()}


def num_tokens(batch: MicroBatch) -> int:
    return len(batch.group.input_ids)
