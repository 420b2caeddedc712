"""Train: recipe -> model -> algorithm -> loop.

torchrun train.py                              # recipes/shapes.yaml: a tiny model, half a minute
torchrun train.py RECIPE --section.name=value  # another recipe, any option changed
torchrun train.py RECIPE --resume=auto         # go on from the newest state in output_dir
torchrun train.py --help [SECTION]             # every option with its default
"""

import math
from collections.abc import Callable

from minivlmrl.config.loading import load_config, recipes_folder
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.diagnostics.memory import check_memory
from minivlmrl.distributed import process_group
from minivlmrl.files import locked
from minivlmrl.run.checkpoints import States
from minivlmrl.run.metrics import MetricsLog, merge, to_floats
from minivlmrl.run.optimizer import build_optimizer, finish_gradients, learning_rate
from minivlmrl.run.results import Results, check_outputs
from minivlmrl.run.setup import prepare
from minivlmrl.run.signals import StopSignals
from minivlmrl.trainers.base import Step, Trainer
from minivlmrl.trainers.registry import find_trainers


def main(arguments: list[str]) -> int:
    """Train by a recipe; returns the exit code: 0, or PREEMPTED when a signal ended the run."""
    if not arguments or arguments[0].startswith("--"):
        arguments = [str(recipes_folder() / "shapes.yaml"), *arguments]
    return start(load_config(arguments[0], arguments[1:]))


def start(config: RunConfig, before_step: Callable = lambda *_: None) -> int:
    """Train by a recipe; returns the exit code, as main.

    Args:
        before_step: called before each step with (algorithm, optimizer, Step, its number, Batches).
    """
    algorithms = find_trainers(config)
    world = process_group.setup(config.num_threads, config.timeout, config.uses_fsdp)
    with StopSignals(world) as signals, locked(config.output_dir, world):
        run(config, algorithms, signals, before_step)
    process_group.shutdown(signals.world)
    return signals.exit_code


def run(config: RunConfig, algorithms: dict[str, type[Trainer]], signals, before_step: Callable):
    """Do all that a recipe asks for, from its first step or from where an earlier attempt ended."""
    world = signals.world
    check_outputs(config)
    if world.is_main:
        print(f"output: {config.output_dir}; open page.html there in a browser", flush=True)
    check_memory(config, world)
    model, processor, datasets = prepare(config, algorithms, world)
    states = States(config, world, signals)
    progress = states.to_resume()
    with MetricsLog(config, world, progress) as log:
        results = Results(config, model, processor, log, datasets.get("eval"), progress)
        algorithm = None
        if states.resumed is None:
            results.measure("start")
        for number in range(progress.stage, len(config.stage_names)):
            stage = config.stage_names[number]
            if algorithm is not None:
                algorithm.save(results.folder)
                world.barrier()  # this stage may read what was saved
            algorithm = algorithms[stage](config, model, processor, world, progress.step)
            train(algorithm, datasets[stage], results, log, states, progress, before_step)
            progress.begin_stage(number + 1)
        results.write(algorithm)


def train(algorithm: Trainer, rows, results, log, states, progress, before_step: Callable):
    """Run one stage, from its first step or from a state (ValueError: a number is not finite)."""
    stage = algorithm.stage
    config = algorithm.config
    progress.check_rows(len(rows))
    batches = Batches(rows, algorithm, progress.draws)
    optimizer = build_optimizer(algorithm.trained, config, algorithm.run.optimizer)
    states.restore(algorithm, optimizer)
    progress.kept = algorithm.begin(batches, results.held_out, progress.kept)
    log.stage(algorithm, optimizer, progress.step, progress.seconds.get(stage, 0.0))
    steps = algorithm.steps(batches)
    for number in range(progress.step, config.max_steps):
        try:
            with states.saved_on_error(progress, log):
                # Evaluation and saving after `number` steps come before the next step, so that a
                # run that was killed between state and evaluation does them when it is resumed.
                results.after_step(algorithm, number)
                step = next(steps)
            before_step(algorithm, optimizer, step, number, batches)
            metrics = optimizer_step(algorithm, step, optimizer, number)
        except FloatingPointError as error:
            raise ValueError(
                f"{stage} step {number}: {error}; "
                f"stopped before the update; try a lower {stage}.learning_rate"
            ) from error
        log.step(number, metrics, step)
        progress.advance(stage, batches.draws, log.seconds)
        states.after_step(progress, log, step.ends_rollout)
    progress.seconds[stage] = log.end_stage()
    with states.saved_on_error(progress, log):
        results.after_step(algorithm, config.max_steps)
        results.measure(f"after_{stage}", algorithm)


def optimizer_step(algorithm: Trainer, step: Step, optimizer, number: int) -> dict[str, float]:
    """Sum gradients over micro-batches and ranks, clip them, update; returns the step's metrics."""
    world = algorithm.world
    parts = []  # of each micro-batch: its metrics, and over how many tokens or pairs they are
    for index, batch in enumerate(step.micro_batches):
        world.leave()
        with algorithm.dropout(number, index):
            loss, metrics = algorithm.training_loss(batch)
            loss.backward()
        values = {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}
        parts.append((values, batch.weight))
    metrics, _ = merge(world.gather_objects(merge(to_floats(parts))))
    max_grad_norm = algorithm.run.optimizer.max_grad_norm
    grad_norm = finish_gradients(algorithm.trained, world, max_grad_norm)
    if not math.isfinite(metrics["loss"]) or not math.isfinite(grad_norm):
        raise FloatingPointError(f"loss {metrics['loss']}, gradient norm {grad_norm}: not finite")
    rate = learning_rate(number, algorithm.config)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    algorithm.after_step(number + 1)
    return metrics | step.metrics | {"grad_norm": grad_norm, "learning_rate": rate}
