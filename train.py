"""Train: recipe -> model -> algorithm -> loop.

torchrun train.py                              # recipes/shapes.yaml: a tiny model learns to name shapes, about a minute
torchrun train.py RECIPE --section.name=value  # another recipe, any field changed; python train.py does the same
"""

import json
import math
import os
import sys
from pathlib import Path

# A waiting thread spins before it sleeps, by default so long that runs took up to four times as long when other work
# kept the cores busy; with this little, idle cores lose nothing. GNU OpenMP reads it when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from minivlmrl.config import RunConfig, StageConfig, load_config, to_yaml
from minivlmrl.data.datasets import CHANCE_NAMES, TOKENIZERS, chance, load_datasets
from minivlmrl.data.processor import Processor
from minivlmrl.model.checkpoint import DTYPES, load_model, load_processor, random_model, save_checkpoint
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL
from minivlmrl.rollout.rewards import required_columns
from minivlmrl.rollout.rollout import Evaluation, evaluate
from minivlmrl.training import distributed
from minivlmrl.training.algorithms.algorithm import Algorithm, Step
from minivlmrl.training.algorithms.dpo import DPO
from minivlmrl.training.algorithms.grpo import GRPO
from minivlmrl.training.algorithms.ppo import PPO
from minivlmrl.training.algorithms.reward_model import RewardModel
from minivlmrl.training.algorithms.sft import SFT
from minivlmrl.training.metrics import MetricsLog, merge
from minivlmrl.training.optimizer import build_optimizer, learning_rate
from minivlmrl.training.report import print_table, write_report

ALGORITHMS = {"sft": SFT, "dpo": DPO, "reward_model": RewardModel, "grpo": GRPO, "ppo": PPO}
DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "shapes.yaml"


def main(arguments: list[str]):
    recipe = arguments[0] if arguments and not arguments[0].startswith("--") else None
    config = load_config(recipe or DEFAULT_RECIPE, arguments[1:] if recipe else arguments)
    for stage in config.stages:
        if stage not in ALGORITHMS:
            raise ValueError(f"stages: unknown algorithm {stage!r}; known are {', '.join(ALGORITHMS)}")
        ALGORITHMS[stage].check(config)
    world = distributed.setup(config.num_threads)
    needs = {stage: ALGORITHMS[stage].needs for stage in config.stages}
    columns = [required_columns(list(names)) for names in (config.rewards, config.data.eval_rewards)]
    datasets = load_datasets(config.data, needs, config.seed, *columns)
    model, processor = build_model(config, world)

    folder = Path(config.output_dir)
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
    log = MetricsLog(folder, world)
    results: dict[str, Evaluation] = {}
    seconds: dict[str, float] = {}

    def measure(name: str, algorithm: Algorithm | None = None):
        if "eval" not in datasets:
            return
        try:
            rows, rewards = datasets["eval"], config.data.eval_rewards
            results[name] = evaluate(model, processor, rows, config.sampling, world, rewards)
            results[name].pairs = algorithm and algorithm.pair_accuracy()
        except FloatingPointError as error:
            raise ValueError(f"evaluation {name}: {error}; try a lower learning rate") from error

    measure("start")
    for stage in config.stages:
        algorithm = ALGORITHMS[stage](config, model, processor, datasets[stage], world, datasets.get("eval"))
        seconds[stage] = train(stage, algorithm, log, folder)
        measure(f"after_{stage}", algorithm)
    if world.is_main:
        save_checkpoint(folder / "checkpoint", model, processor)
        summary = summarize(chance(config.data, datasets.get("eval")), results, seconds)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        name = CHANCE_NAMES.get(config.data.task, "chance")
        print_table(summary, name)
        write_report(folder, summary, datasets.get("eval"), results, name)
    distributed.shutdown()


def train(stage: str, algorithm: Algorithm, log: MetricsLog, folder: Path) -> float:
    """Run one stage; returns its seconds.

    Raises:
        ValueError: a loss, gradient or logit is not finite. The step is named, its update is not made.
    """
    config: StageConfig = getattr(algorithm.run, stage)
    optimizer = build_optimizer(algorithm.trained, config)
    log.stage(stage, config.max_steps)
    steps = algorithm.batches()
    for step in range(config.max_steps):
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
        if algorithm.world.is_main and config.save_steps and (step + 1) % config.save_steps == 0:
            algorithm.save(folder)
    seconds = log.end_stage()
    if algorithm.world.is_main:
        algorithm.save(folder)
    algorithm.world.barrier()  # a later stage may read what was saved
    return seconds


def optimizer_step(
    algorithm: Algorithm, work: Step, optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float
) -> dict[str, float]:
    """Accumulate the gradients of a step's micro-batches and ranks, clip them, update; returns the step's figures."""
    model, world, parts = algorithm.trained, algorithm.world, []
    for batch in work.batches:
        loss, metrics = algorithm.loss(batch)
        loss.backward()
        parts.append(({name: value.item() for name, value in {"loss": loss, **metrics}.items()}, batch.weight))
    world.sum_gradients(model)
    metrics, _ = merge(world.gather_objects(merge(parts)))
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
    if not math.isfinite(metrics["loss"]) or not math.isfinite(grad_norm):
        raise FloatingPointError(f"loss {metrics['loss']}, gradient norm {grad_norm}: not finite")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return metrics | work.metrics | {"grad_norm": grad_norm, "learning_rate": rate}


def build_model(config: RunConfig, world: distributed.World) -> tuple[Qwen2_5_VL, Processor]:
    """Load the recipe's checkpoint, or make a random model for the embedded task."""
    section, data = config.model, config.data
    if (section.path is None) == (section.config is None):
        raise ValueError("model: set either model.path (a Hugging Face folder) or model.config (random weights)")
    if section.dtype not in DTYPES:
        raise ValueError(f"model.dtype is {section.dtype!r}, it must be one of {', '.join(DTYPES)}")
    if section.path:
        model = load_model(section.path, DTYPES[section.dtype], world.device)
        processor = load_processor(section.path, data.min_pixels, data.max_pixels)
    elif data.task is None:
        raise ValueError("model.config builds a model for an embedded task; with data.train_file set model.path")
    else:
        tokenizer = TOKENIZERS[data.task]()
        model, processor = random_model(section.config, tokenizer, config.seed, data.min_pixels, data.max_pixels)
        model = model.to(world.device, DTYPES[section.dtype])
    processor.image_processor.resize = data.resize or processor.image_processor.resize
    processor.add_vision_id = data.add_vision_id
    return model, processor


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


if __name__ == "__main__":
    main(sys.argv[1:])
    distributed.exit_rank()
