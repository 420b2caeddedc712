"""Train: recipe -> model -> algorithm -> loop.

torchrun train.py                              # recipes/shapes.yaml: a tiny model learns to name shapes, about a minute
torchrun train.py RECIPE --section.name=value  # another recipe, any field changed; python train.py does the same
torchrun train.py RECIPE --resume=auto         # go on from the newest state in output_dir (docs/many_gpus.md)
"""

import json
import math
import os
import sys
import traceback
from pathlib import Path

# A waiting thread spins before it sleeps, by default so long that runs took up to four times as long when other work
# kept the cores busy; with this little, idle cores lose nothing. GNU OpenMP reads it when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from minivlmrl.algorithms.algorithm import Algorithm, Step
from minivlmrl.algorithms.dpo import DPO
from minivlmrl.algorithms.ppo import PPO
from minivlmrl.algorithms.reward_model import RewardModel
from minivlmrl.algorithms.sft import SFT
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.grpo import GRPO
from minivlmrl.hub.checkpoint import DTYPES, check_fits, load_model, load_processor, random_model
from minivlmrl.rewards import required_columns
from minivlmrl.rows import Processor
from minivlmrl.run.batches import CHANCE_NAMES, TOKENIZERS, chance, load_datasets
from minivlmrl.run.config import RunConfig, StageConfig, load_config, to_yaml
from minivlmrl.run.evaluate import Evaluation, evaluate
from minivlmrl.run.metrics import MetricsLog, merge
from minivlmrl.run.optimizer import build_optimizer, finish_gradients, learning_rate
from minivlmrl.scale import ranks as distributed
from minivlmrl.scale.resume import Progress, State, States
from minivlmrl.scale.saving import save_model
from minivlmrl.scale.sharding import Sharding, recompute_blocks
from minivlmrl.scale.signals import PREEMPTED, Preempted, StopSignals
from minivlmrl.tools.report import print_table, write_report

ALGORITHMS = {"sft": SFT, "dpo": DPO, "reward_model": RewardModel, "grpo": GRPO, "ppo": PPO}
# in a wheel recipes/ is part of the package
RECIPES = next(folder / "recipes" for folder in Path(__file__).parents if (folder / "recipes").is_dir())
DEFAULT_RECIPE = RECIPES / "shapes.yaml"


def main(arguments: list[str]) -> int:
    """Train by a recipe; returns the exit code: 0, or PREEMPTED after a signal, when there is a state to go on from."""
    recipe = arguments[0] if arguments and not arguments[0].startswith("--") else None
    config = load_config(recipe or DEFAULT_RECIPE, arguments[1:] if recipe else arguments)
    for stage in config.stages:
        if stage not in ALGORITHMS:
            raise ValueError(f"stages: unknown algorithm {stage!r}; known are {', '.join(ALGORITHMS)}")
        ALGORITHMS[stage].check(config)
    world = distributed.setup(config.num_threads, config.timeout, config.sharding.enabled)
    code = 0
    try:
        with StopSignals(world) as signals:
            run(config, world, signals)
    except Preempted as preempted:
        code = PREEMPTED
        if world.is_main:
            print(preempted, flush=True)
    distributed.shutdown()
    return code


def run(config: RunConfig, world: distributed.World, signals: StopSignals):
    """Do all that a recipe asks for, from its first step or from where an earlier attempt has come."""
    needs = {stage: ALGORITHMS[stage].needs for stage in config.stages}
    columns = [required_columns(list(names)) for names in (config.rewards, config.data.eval_rewards)]
    datasets = load_datasets(config.data, needs, config.seed, *columns)
    model, processor = build_model(config, world)

    states = States(config, world, signals)
    state = states.to_resume()
    progress = state.progress if state else Progress(config.stages)
    folder = Path(config.output_dir)
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
    log = MetricsLog(folder, world, progress.logs)

    def measure(name: str, algorithm: Algorithm | None = None):
        if "eval" not in datasets:
            return
        try:
            rows, rewards, gather = datasets["eval"], config.data.eval_rewards, config.rollout.gather_weights
            result = evaluate(model, processor, rows, config.sampling, world, rewards, gather)
            result.pairs = algorithm and algorithm.pair_accuracy()
            progress.results[name] = result
        except FloatingPointError as error:
            raise ValueError(f"evaluation {name}: {error}; try a lower learning rate") from error

    if state is None:
        measure("start")
    for number, stage in list(enumerate(config.stages))[progress.stage :]:
        algorithm = ALGORITHMS[stage](config, model, processor, datasets[stage], world, datasets.get("eval"))
        train(stage, algorithm, log, folder, states, progress, state)
        measure(f"after_{stage}", algorithm)
        progress.stage, progress.step, state = number + 1, 0, None
    save_model(folder / "checkpoint", model, processor, world)
    if world.is_main:
        summary = summarize(chance(config.data, datasets.get("eval")), progress.results, progress.seconds)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        name = CHANCE_NAMES.get(config.data.task, "chance")
        print_table(summary, name)
        write_report(folder, summary, datasets.get("eval"), progress.results, name)


def train(
    stage: str,
    algorithm: Algorithm,
    log: MetricsLog,
    folder: Path,
    states: States,
    progress: Progress,
    state: State | None = None,
):
    """Run one stage.

    Args:
        progress: is kept up to date.
        state: what the stage goes on from; None: it begins.
    Raises:
        ValueError: a loss, gradient or logit is not finite. The step is named, its update is not made.
        Preempted: after a signal, when the state is saved.
    """
    config: StageConfig = getattr(algorithm.run, stage)
    optimizer = build_optimizer(algorithm.trained, config)
    if state is None:
        algorithm.begin()
    else:
        state.restore(algorithm, optimizer)
    log.stage(stage, config.max_steps, progress.step, progress.seconds[stage] if state else 0.0)
    steps = algorithm.batches()
    for step in range(progress.step, config.max_steps):
        try:
            metrics = optimizer_step(
                algorithm, next(steps), optimizer, learning_rate(step, config), config.max_grad_norm
            )
        except FloatingPointError as error:
            raise ValueError(
                f"{stage} step {step}: {error}; stopped before the update, the last checkpoint in {folder} is intact. "
                f"Try a lower {stage}.learning_rate"
            ) from error
        log.step(step, metrics)
        if config.save_steps and (step + 1) % config.save_steps == 0:
            algorithm.save(folder)
        progress.step, progress.steps = step + 1, progress.steps + 1
        progress.seconds[stage] = log.seconds
        states.after_step(progress, algorithm, optimizer, log)
    progress.seconds[stage] = log.end_stage()
    algorithm.save(folder)
    algorithm.world.barrier()  # a later stage may read what was saved


def optimizer_step(
    algorithm: Algorithm, work: Step, optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float
) -> dict[str, float]:
    """Accumulate the gradients of a step's micro-batches and ranks, clip them, update; returns the step's figures."""
    model, world, parts = algorithm.trained, algorithm.world, []
    for batch in work.batches:
        loss, metrics = algorithm.loss(batch)
        (loss * 0 if batch.idle else loss).backward()
        if not batch.idle:
            parts.append(({name: value.item() for name, value in {"loss": loss, **metrics}.items()}, batch.weight))
    metrics, _ = merge(world.gather_objects(merge(parts)))
    grad_norm = finish_gradients(model, world, max_grad_norm)
    if not math.isfinite(metrics["loss"]) or not math.isfinite(grad_norm):
        raise FloatingPointError(f"loss {metrics['loss']}, gradient norm {grad_norm}: not finite")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    algorithm.after_step()
    return metrics | work.metrics | {"grad_norm": grad_norm, "learning_rate": rate}


def build_model(config: RunConfig, world: distributed.World) -> tuple[Qwen2_5_VL, Processor]:
    """Load the recipe's checkpoint, or make a random model for the embedded task."""
    section, data = config.model, config.data
    if (section.path is None) == (section.config is None):
        raise ValueError("model: set either model.path (a Hugging Face folder) or model.config (random weights)")
    if section.dtype not in DTYPES:
        raise ValueError(f"model.dtype is {section.dtype!r}, it must be one of {', '.join(DTYPES)}")
    sharding = build_sharding(config, world) if config.sharding.enabled else None
    if section.path:
        processor = load_processor(section.path, data.min_pixels, data.max_pixels)
        check_fits(section.path, processor)  # before the weights: mistakes show early
        model = load_model(section.path, DTYPES[section.dtype], world.device, sharding)
    elif data.task is None:
        raise ValueError("model.config builds a model for an embedded task; with data.train_file set model.path")
    else:
        tokenizer = TOKENIZERS[data.task]()
        model, processor = random_model(section.config, tokenizer, config.seed, data.min_pixels, data.max_pixels)
        model = model.to(world.device, DTYPES[section.dtype])
        if sharding is not None:
            sharding.shard(model)
    if section.activation_checkpointing and sharding is None:
        recompute_blocks(model)
    processor.image_processor.resize = data.resize or processor.image_processor.resize
    processor.add_vision_id = data.add_vision_id
    return model, processor


def build_sharding(config: RunConfig, world: distributed.World) -> Sharding:
    """How the recipe's models are cut."""
    compute = config.sharding.compute_dtype
    if compute is not None and compute not in DTYPES:
        raise ValueError(f"sharding.compute_dtype is {compute!r}, it must be one of {', '.join(DTYPES)}")
    dtype, recompute = DTYPES[config.model.dtype], config.model.activation_checkpointing
    return Sharding(config.sharding, world.size, world.device, dtype, DTYPES.get(compute), recompute)


def summarize(chance: float | None, results: dict[str, Evaluation], seconds: dict[str, float]) -> dict:
    """The table of the run, as written to summary.json."""
    table = {}
    for name, result in results.items():
        figures = {key: getattr(result, key) for key in ("sampled", "greedy", "format")}
        # nothing to report where no row could be judged: held-out pairs need no solution
        table[name] = {key: value for key, value in figures.items() if not math.isnan(value)} | result.more
        if result.pairs is not None:
            table[name]["pairs"] = result.pairs
    return {"chance": chance, **table, "seconds": seconds}


def start(arguments: list[str]):
    """Be one rank of a run from beginning to end."""
    try:
        # record: torchrun shows the traceback of the rank that failed first
        exit_code = record(distributed.after_the_cause()(main))(arguments)
    except Exception:
        traceback.print_exc()
        exit_code = 1
    distributed.exit_rank(exit_code)


if __name__ == "__main__":
    start(sys.argv[1:])
