"""`python -m minivlmrl replay RUN --step 73 --prompt 4`: one step of a run again.

RUN is the folder of a run, or a recipe. The nearest state before the step is read, or the run
begins anew; the steps in between are trained, and nothing is written in RUN. Draws depend on keys
alone, so what completions.jsonl and metrics.jsonl say of the step is compared to the last bit.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from minivlmrl import train
from minivlmrl.algorithms.table import find_algorithms
from minivlmrl.batch import pack
from minivlmrl.data.turns import text_of
from minivlmrl.hub.folder import json_text, parse_json, read_lines
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.batches import Batches
from minivlmrl.run.completions import Logged, groups
from minivlmrl.run.config import check_found, load_config
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.run.resume import Progress, States
from minivlmrl.run.start import prepare
from minivlmrl.scale import ranks


def main(arguments: list[str]) -> int:
    """Replay a step and print one of its groups; 1 if a file of the run says something else."""
    parser = argparse.ArgumentParser(
        "python -m minivlmrl replay", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("run", help="the folder of a run; or a recipe, with --section.name=value")
    parser.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    parser.add_argument("--stage", help="by default the last one")
    parser.add_argument("--step", type=int, default=0, help="of the stage, from 0")
    parser.add_argument("--prompt", type=int, default=0, help="of the step, from 0")
    options, overrides = parser.parse_known_args(arguments)
    folder, number = Path(options.run), options.step
    config = run_config(folder, options.recipe, overrides)
    stage = options.stage or ["none", *config.stages][-1]
    algorithm, optimizer, step, rows = go_to(config, stage, number)
    show(algorithm, step, rows, options.prompt)
    metrics = train.optimizer_step(algorithm, step, optimizer, number)
    ranks.shutdown()
    same = compare(folder, algorithm, step, number, metrics)
    other = "something else: another CPU, number of threads or ranks, or version of torch?"
    said = [f"{name} says {'the same' if equal else other}" for name, equal in same.items()]
    print(*said or ["nothing to compare with: no file of a run has this step"], sep="\n")
    return int(not all(same.values()))


def run_config(folder: Path, recipe: str | None, overrides: list[str]):
    """Read the recipe of a run's folder, or another one (ValueError: it is changed, names code)."""
    if not folder.is_dir():
        return load_config(folder, overrides)
    if changed := [word for word in overrides if not word.startswith("--num_threads=")]:
        raise ValueError(f"{folder}: a run is replayed as it was; only a recipe takes {changed[0]}")
    given = recipe or folder / "config.yaml"
    config = load_config(given, [f"--output_dir={folder}", *overrides])
    if not recipe:
        check_found(given, config, overrides)
    return config


def go_to(config, stage: str, number: int) -> tuple:
    """Train until a step is next: algorithm, optimizer, Step, rows."""
    for algorithm, optimizer, step, done, batches in steps_to(config, stage, number):
        if (algorithm.stage, done) == (stage, number):
            again = Batches(batches.dataset, algorithm, batches.draws - 1)
            return algorithm, optimizer, step, step.rollout.rows if step.rollout else next(again)
        train.optimizer_step(algorithm, step, optimizer, done)


def steps_to(config, stage: str, number: int) -> Iterator[tuple]:
    """Yield what is to be trained up to a step: algorithm, optimizer, Step, its number, Batches.

    Nothing is written (ValueError: there is no such step).
    """
    if stage not in config.stages:
        raise ValueError(f"--stage {stage}: the run has {', '.join(config.stages)}")
    world = ranks.setup(config.num_threads, config.timeout, config.uses_fsdp)
    wanted = config.stages.index(stage)
    algorithms = find_algorithms(config)
    model, processor, datasets = prepare(config, algorithms, world)
    lengths = [getattr(config, name).max_steps for name in config.stages]
    if not 0 <= number < lengths[wanted]:
        raise ValueError(f"--step {number}: {stage} has the steps 0 to {lengths[wanted] - 1}")
    states = States(config, world, None)
    earlier = [path for path in states.paths() if int(path.name) <= sum(lengths[:wanted]) + number]
    # the newest that is whole
    found = next(filter(None, map(states.read, reversed(earlier))), None)
    states.resumed, progress = found or (None, Progress(config.seed, config.stages, states.data))
    if progress.data != states.data:
        changed = "the section data or the rows have changed since; put them back"
        raise ValueError(f"{states.resumed}: {changed}")
    states.check_base(progress)
    print(f"{stage} step {number}, trained again from {states.resumed or 'the beginning'}")
    for index in range(progress.stage, wanted + 1):
        algorithm = algorithms[config.stages[index]](config, model, processor, world)
        batches = Batches(datasets[algorithm.stage], algorithm, progress.draws)
        optimizer = build_optimizer(algorithm.trained, algorithm.config, config.optimizer)
        states.restore(algorithm, optimizer)
        steps = algorithm.steps(batches)
        for done in range(progress.step, number + 1 if index == wanted else lengths[index]):
            yield algorithm, optimizer, next(steps), done, batches
        progress.begin_stage(index + 1)


@torch.no_grad()
def show(algorithm, step, rows, index: int):
    """Print a prompt of a step and its completions; log-probabilities are sums, in nats."""
    prompts = step.prompts if step.rollout else range(len(rows))
    if not 0 <= index < len(prompts):
        raise ValueError(f"--prompt {index}: the step has the prompts 0 to {len(prompts) - 1}")
    row, temperature = rows[prompts[index]], 1.0
    if step.rollout:
        answers = step.rollout.completions[prompts[index]]
        temperature = algorithm.run.sampling.temperature
        earned = list(groups(algorithm, step))[index][1]["completions"]
        names = "reward", "advantage"
        table = [one["rewards"] | {name: one[name] for name in names} for one in earned]
    else:
        _, [answers] = algorithm.encode([row])
        table = [{"answer": name} for name in algorithm.answers]
    prompt, policy = row.prompt(algorithm.processor), algorithm.policy
    group = pack([prompt], [answers], policy.config, algorithm.world.device)
    trained = group.split(per_token_logps(policy, group, temperature)[0].cpu())
    for line, now, completion in zip(table, trained, answers, strict=True):
        now = now[completion.written]
        line |= {"tokens": len(now), "trained": now.sum().item()}
        if completion.logps is not None:  # given answers were not drawn
            sampled = completion.logps[completion.written]
            worst = (now - sampled).abs().max().item()
            line |= {"sampled": sampled.sum().item(), "differ by": worst}
    said = f"{text_of(row.messages[-1])!r}, solution {row.columns.get('solution')!r}"
    print(f"row {row.index} {row.where}: {said}")
    print("completion", *(f"{name:>10}" for name in table[0]))
    for number, (line, own) in enumerate(zip(table, answers, strict=True)):
        values = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in line.values()]
        print(f"{number:<10}", *(f"{value:>10}" for value in values))
        print(f"    {algorithm.processor.decode(own.ids)!r}")


def compare(folder: Path, algorithm, step, number: int, metrics: dict) -> dict[str, bool]:
    """Which files of the run know the step, and whether they say what the replay says."""
    said = [line for _, line in groups(algorithm, step)] if step.rollout else []
    at, same = (algorithm.stage, number), {}
    for name, lines in (("completions.jsonl", said), ("metrics.jsonl", [metrics])):
        written = read_lines(folder / name, Logged)
        logged = [line for line in written if (line["stage"], line["step"]) == at]
        again = {line.get("row"): line for line in parse_json(json_text(lines))}
        if logged:
            known = [line | again.get(line.get("row"), {"row": None}) for line in logged]
            same[name] = known == logged
    return same
