"""The training loop: run_training -> train_stages -> train_stage -> optimizer_step."""

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed import process_group
from minivlmrl.files import locked
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.checkpoints import CheckpointManager
from minivlmrl.run.metrics import MetricsLog, check_mismatch, merge, to_floats
from minivlmrl.run.optimizer import build_optimizer, finish_gradients, learning_rate
from minivlmrl.run.results import Results, check_outputs
from minivlmrl.run.setup import prepare
from minivlmrl.run.signals import StopSignals
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer
from minivlmrl.trainers.registry import find_trainers


def run_training(config: RunConfig, callbacks: Sequence[Callback] | None = None) -> int:
    """Train as a recipe describes: in this process, or as one rank of several.

    Args:
        callbacks: what happens beside training, by default what run/callbacks.py lists.
    Returns:
        The exit code of the process: 0, or PREEMPTED if a signal ended the run.
    """
    if callbacks is None:
        callbacks = default_callbacks(config)
    trainers = find_trainers(config)
    world = process_group.setup(config.num_threads, config.timeout, config.uses_fsdp)
    with StopSignals(world) as signals, locked(config.output_dir, world):
        train_stages(config, trainers, signals, callbacks)
    process_group.shutdown(signals.world)
    return signals.exit_code


def train_stages(
    config: RunConfig,
    trainers: dict[str, type[Trainer]],
    signals: StopSignals,
    callbacks: Sequence[Callback],
):
    """Do all that a recipe asks for, from its first step or from where an earlier attempt ended."""
    world = signals.world
    check_outputs(config)
    if world.is_main:
        print(f"output: {config.output_dir}; open report.html there in a browser", flush=True)
    for callback in callbacks:
        callback.on_setup(config, world)
    model, processor, datasets = prepare(config, trainers, world)
    checkpoints = CheckpointManager(config, world, signals, callbacks)
    state = checkpoints.to_resume()
    with MetricsLog(config, world, state) as log:
        held_out = datasets.get("eval")
        results = Results(config, model, processor, log, held_out, state, callbacks)
        for callback in callbacks:
            callback.on_run_begin(config, log)
            log.callback(callback.on_run_end)  # called however the run ends
        trainer = None
        if checkpoints.resumed is None:
            results.measure("start")
        for number in range(state.stage, len(config.stage_names)):
            stage = config.stage_names[number]
            if trainer is not None:
                trainer.save(results.folder)
                world.barrier()  # this stage may read what was saved
            trainer = trainers[stage](config, model, processor, world, state.step)
            train_stage(trainer, datasets[stage], results, log, checkpoints, state, callbacks)
            state.begin_stage(number + 1)
        results.write(trainer)


def train_stage(
    trainer: Trainer,
    rows: Dataset,
    results: Results,
    log: MetricsLog,
    checkpoints: CheckpointManager,
    state: TrainerState,
    callbacks: Sequence[Callback],
):
    """Run one stage, from its first step or from a state (ValueError: a number is not finite)."""
    stage = trainer.stage
    config = trainer.config
    state.check_rows(len(rows))
    batches = Batches(rows, trainer, state.draws)
    optimizer = build_optimizer(trainer.trained, config, trainer.run.optimizer)
    checkpoints.restore(trainer, optimizer)
    state.kept = trainer.on_stage_begin(batches, results.held_out, state.kept)
    log.stage(trainer, state.step, state.seconds.get(stage, 0.0))
    for callback in callbacks:
        callback.on_stage_begin(trainer, optimizer, state)
    steps = trainer.steps(batches)
    for number in range(state.step, config.max_steps):
        try:
            with checkpoints.saved_on_error(state, log):
                # Evaluation and saving after `number` steps come before the next step, so that a
                # run that was killed between state and evaluation does them when it is resumed.
                results.after_step(trainer, number)
                step = next(steps)
            for callback in callbacks:
                callback.on_step_begin(trainer, optimizer, step, number, batches)
            metrics = optimizer_step(trainer, step, optimizer, number)
        except FloatingPointError as error:
            raise ValueError(
                f"{stage} step {number}: {error}; "
                f"stopped before the update; try a lower {stage}.learning_rate"
            ) from error
        check_mismatch(trainer.run, metrics)
        values = log.step(number, metrics, step)
        for callback in callbacks:
            callback.on_step_end(trainer, step, number, values)
        log.mark()
        state.advance(stage, batches.draws, log.seconds)
        checkpoints.after_step(state, log, step.ends_rollout)
    state.seconds[stage] = log.end_stage()
    with checkpoints.saved_on_error(state, log):
        results.after_step(trainer, config.max_steps)
        results.measure(f"after_{stage}", trainer)


def optimizer_step(
    trainer: Trainer, step: Step, optimizer: Optimizer, number: int
) -> dict[str, float]:
    """Sum gradients over micro-batches and ranks, clip them, update; returns the step's metrics."""
    world = trainer.world
    parts = []  # of each micro-batch: its metrics, and over how many tokens or pairs they are
    for index, batch in enumerate(step.micro_batches):
        world.stop_if_preempted()
        with trainer.dropout(number, index):
            loss, metrics = trainer.training_loss(batch)
            loss.backward()
        values = {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}
        parts.append((values, batch.weight))
    metrics, _ = merge(world.gather_objects(merge(to_floats(parts))))
    max_grad_norm = trainer.run.optimizer.max_grad_norm
    grad_norm = finish_gradients(trainer.trained, world, max_grad_norm)
    if not math.isfinite(metrics["loss"]) or not math.isfinite(grad_norm):
        raise FloatingPointError(f"loss {metrics['loss']}, gradient norm {grad_norm}: not finite")
    rate = learning_rate(number, trainer.config)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    trainer.after_step(number + 1)
    return metrics | step.metrics | {"grad_norm": grad_norm, "learning_rate": rate}
