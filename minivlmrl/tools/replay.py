"""`python -m minivlmrl replay RUN --step 73 --prompt 4`: one step of a run again, and all that happens to one prompt.

RUN is the folder of a run, or a recipe. The nearest state before the step is read, or the run begins anew; the steps in
between are trained, and nothing is written. Draws depend on keys alone, so what completions.jsonl and metrics.jsonl say
of the step is compared to the last bit. docs/walkthrough.md has the same stops of a default run.
"""

import argparse
import inspect
import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minivlmrl import attention, image, logprobs, losses, rewards, rope, train, vision
from minivlmrl.advantages import group_advantages
from minivlmrl.algorithms.idle_rows import some_rows
from minivlmrl.grpo import GRPO
from minivlmrl.rows import Processor
from minivlmrl.run.batches import Batches
from minivlmrl.run.completions import groups
from minivlmrl.run.config import load_config
from minivlmrl.run.optimizer import build_optimizer, finish_gradients
from minivlmrl.run.resume import Progress, States
from minivlmrl.run.start import prepare
from minivlmrl.scale import ranks


@dataclass
class Stop:
    """A stop on the way: what of the book does it, what there is here, and the same for drawings."""

    title: str
    code: Callable
    lines: list[str]
    data: dict = field(default_factory=dict)


def go_to(config, stage: str, number: int) -> tuple:
    """Train, without writing, until a step is next: algorithm, optimizer, Step, rows (ValueError: there is none)."""
    if stage not in config.stages:
        raise ValueError(f"--stage {stage}: the run has {', '.join(config.stages)}")
    world, wanted = ranks.setup(config.num_threads, config.timeout, config.uses_fsdp), config.stages.index(stage)
    algorithms = {name: train.find_algorithm(name, config) for name in config.stages}
    model, processor, datasets = prepare(config, algorithms, world)
    lengths = [getattr(config, name).max_steps for name in config.stages]
    if not 0 <= number < lengths[wanted]:
        raise ValueError(f"--step {number}: {stage} has the steps 0 to {lengths[wanted] - 1}")
    states = States(config, world, None)
    earlier = [path for path in states.paths() if int(path.name) <= sum(lengths[:wanted]) + number]
    found = next(filter(None, map(states.read, reversed(earlier))), None)  # the newest that is whole
    states.resumed, progress = found or (None, Progress(config.seed, config.stages, states.data))
    if progress.data != states.data:
        raise ValueError(f"{states.resumed}: the section data or the rows have changed since; put them back")
    print(f"{stage} step {number}, trained again from {states.resumed or 'the beginning'}")
    for index in range(progress.stage, wanted + 1):
        algorithm = algorithms[config.stages[index]](config, model, processor, world)
        batches = Batches(datasets[algorithm.stage], algorithm, progress.draws)
        optimizer = build_optimizer(algorithm.trained, algorithm.config)
        if not states.restore(algorithm, optimizer):
            algorithm.begin(batches, datasets.get("eval"))
        steps = algorithm.steps(batches)
        for done in range(progress.step, number if index == wanted else lengths[index]):
            train.optimizer_step(algorithm, next(steps), optimizer, done)
        progress.begin_stage(index + 1)
    step = next(steps)
    rows = step.rollout.rows if step.rollout else next(Batches(datasets[stage], algorithm, batches.draws - 1))
    return algorithm, optimizer, step, rows


class Walk:
    """A prompt of what go_to returns, by its index in the step (ValueError: there are fewer), and its completions."""

    def __init__(self, algorithm, optimizer, step, rows, number: int, index: int):
        self.algorithm, self.optimizer, self.step, self.number, self.index = algorithm, optimizer, step, number, index
        self.policy, self.in_book, batches = algorithm.policy, type(algorithm) is GRPO, step.micro_batches
        self.temperature = algorithm.run.sampling.temperature if step.rollout else 1.0
        G = algorithm.config.num_generations if step.rollout else len(algorithm.answers)
        given = torch.arange(sum(len(batch.loss_mask) for batch in batches)).split([len(b.loss_mask) for b in batches])
        of = [batch.rows // G for batch in batches] if step.rollout else [numbers // G for numbers in given]
        if not 0 <= index < len(known := torch.cat(of).unique().tolist()):
            raise ValueError(f"--prompt {index}: the step has the prompts 0 to {len(known) - 1}")
        found = [(batch, (own == known[index]).nonzero()[:, 0]) for batch, own in zip(batches, of, strict=True)]
        batch, chosen = max(found, key=lambda part: len(part[1]))  # max_tokens_per_micro_batch may divide a group
        self.batch = some_rows(algorithm, batch, chosen)  # a micro-batch of this prompt alone
        self.row, self.group = rows[known[index]], self.batch.group
        [self.prompt], self.ids = self.group.prompts, self.group.split(self.group.completion_ids)

    def stops(self) -> Iterator[Stop]:
        """All stops; the last ones train the step."""
        for part in (self.see, self.ask, self.answer, self.earn, self.learn):
            yield from part()

    @torch.no_grad()
    def see(self) -> Iterator[Stop]:
        """The first picture, and all images as vectors of the decoder."""
        settings, grids = self.algorithm.processor.image_processor, self.prompt.image_grid_thw
        if self.row.images:
            pixels = np.asarray(image.to_rgb(self.row.images[0]))
            (h, w, _), (rows, cols) = pixels.shape, (settings.patch_size * count for count in grids[0, 1:].tolist())
            yield Stop("RGB", image.load_image, [shown("pixels", pixels, 9)], {"pixels": pixels})
            allowed = f"multiples of {settings.factor}, area {settings.min_pixels} to {settings.max_pixels}"
            yield Stop("Resize", image.smart_resize, [f"{h} x {w} -> {rows} x {cols} (height x width): {allowed}"])
        if len(grids):
            lines = [shown("pixel_values", self.prompt.pixel_values), shown("image_grid_thw", grids)]
            yield Stop("Patches", image.patchify, lines, {"grid": grids[0].tolist(), "side": settings.patch_size})
            order, windows, frames = vision.window_order(grids, self.policy.config.vision_config)
            lines = [shown("order", order, 16), f"patches of each window {windows}, of each frame {frames}"]
            yield Stop("Windows", vision.window_order, lines, {"order": order.tolist()})
            merged = self.policy.visual(self.group.pixel_values, grids)
            yield Stop("Merged tokens", vision.VisionTransformer.forward, [shown("vision_embeds", merged)])

    def ask(self) -> Iterator[Stop]:
        """The prompt as ids, their positions, and the run that it shares with its completions."""
        ids, lengths, config = self.prompt.input_ids, self.group.layout.row_lengths, self.policy.config
        same = [(word, len(list(some))) for word, some in itertools.groupby(self.spell(ids))]
        words = " ".join(f"{word} x {count}" if count > 1 else word for word, count in same)
        yield Stop("Prompt", Processor.__call__, [shown("input_ids", ids), *textwrap.wrap(words, 100)])
        positions = rope.get_rope_index(ids, self.prompt.image_grid_thw, config, self.prompt.second_per_grid_ts)
        start = max(0, int((ids == config.image_token_id).int().argmax()) - 2)
        lines = [shown("position_ids", positions), f"from token {start} on:"]
        for name, axis in zip(("time", "height", "width"), positions.tolist(), strict=True):
            lines.append(f"  {name:<7}" + " ".join(f"{x:2}" for x in axis[start : start + 21]))
        yield Stop("Positions", rope.get_rope_index, lines)
        lines = [f"a prompt of {len(ids)} tokens, completions of {lengths} less 1 each"]
        lines.append(f"as separate rows they would be {sum(len(ids) + n - 1 for n in lengths)} tokens")
        yield Stop("Run", attention.GroupLayout, [shown("input_ids", self.group.input_ids), *lines])

    @torch.no_grad()
    def answer(self) -> Iterator[Stop]:
        """The completions: logits, log-probabilities, texts."""
        states, words = logprobs.completion_states(self.policy, self.group), [self.spell(row) for row in self.ids]
        lines = [f"{'token':<14}{'logit':>9}{'logsumexp':>11}{'logp':>11}{'prob':>9}"]
        for state, number, word in zip(states, self.ids[0].tolist(), words[0], strict=False):
            logits = self.policy.lm_head(state) / self.temperature
            logit, total = logits[number].item(), logits.logsumexp(-1).item()
            cells = f"{clean(logit):>9}{clean(total):>11}{clean(logit - total):>11}"
            lines.append(f"{word:<14}{cells}{clean(math.exp(logit - total)):>9}")
        yield Stop("Logits", logprobs.plain_per_token_logps, lines)
        rows = self.logps()
        lines = [shown("logps", rows[self.group.completion_mask.bool()]), shown("in rows", rows, 0)]
        if self.step.rollout:
            lines.append(shown("when drawn", self.batch.sampler_logps[self.group.completion_mask.bool()]))
        yield Stop("Log-probabilities", logprobs.per_token_logps, lines, {"words": words, "logps": rows.tolist()})
        texts = map(self.algorithm.processor.decode, self.ids)
        yield Stop("Text", Processor.decode, [f"{number}  {text!r}" for number, text in enumerate(texts)])

    def earn(self) -> Iterator[Stop]:
        """What the completions of a rollout are worth."""
        if self.step.rollout is None:
            return
        about = list(groups(self.algorithm, self.step))[self.index][1]
        lines = ["".join(f"{name:>12}" for name in ("completion", *self.algorithm.run.rewards, "sum"))]
        for number, said in enumerate(about["completions"]):
            cells = number, *map(clean, said["rewards"].values()), clean(said["reward"])
            lines.append("".join(f"{cell:>12}" for cell in cells))
        yield Stop("Rewards", rewards.score, [*lines, f"solution: {about['solution']!r}"], about)
        worth, code = self.batch.advantages, group_advantages if self.in_book else self.algorithm.compute_advantages
        yield Stop("Advantages", code, [shown("advantages", worth if worth.dim() == 1 else worth[0], 20)])
        before = self.logps()
        old = before if self.batch.old_per_token_logps is None else self.batch.old_per_token_logps
        ratio = (before - old).exp()[self.batch.loss_mask.bool()]
        lines = [shown("ratio", ratio), f"from {clean(ratio.min().item())} to {clean(ratio.max().item())}"]
        yield Stop("Ratio", losses.importance_ratio, lines)

    def learn(self) -> Iterator[Stop]:
        """Loss, gradient, and what the update changes."""
        norms, before, limit = {}, self.logps(), self.algorithm.config.max_grad_norm
        with torch.no_grad():  # a kept prefill is for the step
            share = self.algorithm.loss(self.batch)[0].item()
        self.optimizer.register_step_pre_hook(lambda *_: norms.update(gradient_norms(self.algorithm.trained)))
        metrics = train.optimizer_step(self.algorithm, self.step, self.optimizer, self.number)
        text = f"{clean(metrics['loss'])}, of which this prompt {clean(share)}"
        yield Stop("Loss", losses.grpo_loss if self.in_book else self.algorithm.loss, [text])
        lines = [f"{name:<24}{clean(value):>9}" for name, value in norms.items()]
        lines.append(f"all: {clean(metrics['grad_norm'])} before it was cut to at most {limit:g}")
        yield Stop("Gradient", finish_gradients, lines, {"norms": norms})
        change = ((self.logps() - before) * self.batch.loss_mask).sum(1).tolist()
        lines = [f"learning rate {metrics['learning_rate']:.3g}; the completions' log-probabilities change by"]
        data = {"change": change, "metrics": metrics}
        yield Stop("Update", train.optimizer_step, [*lines, "  ".join(map(clean, change))], data)

    @torch.no_grad()
    def logps(self) -> Tensor:
        """(R, T) log-probabilities of the completions by the policy as it is now."""
        return self.group.pad(logprobs.per_token_logps(self.policy, self.group, self.temperature)[0])

    def spell(self, ids: Tensor) -> list[str]:
        """The text of each token, with what does not show spelled out."""
        decode = self.algorithm.processor.tokenizer.decode
        return [repr(decode([number]))[1:-1] for number in ids.tolist()]


def link(code: Callable, form: str = "{name} ({path}:{line})") -> str:
    """Say where a function is, as Python finds it."""
    code = inspect.unwrap(code)
    path = Path(inspect.getsourcefile(code)).relative_to(Path(__file__).parents[2])
    return form.format(name=code.__qualname__, path=path.as_posix(), line=inspect.getsourcelines(code)[1])


def gradient_norms(model) -> dict[str, float]:
    """The norm of the gradient of each layer, block, or other module."""
    squares = Counter()
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("policy.").split(".")[:-1]
        module = ".".join(parts[: 3 if {"blocks", "layers"} & set(parts) else 2])
        squares[module] += 0.0 if parameter.grad is None else parameter.grad.square().sum().item()
    return {name: math.sqrt(value) for name, value in squares.items() if value}


def clean(value: float | None) -> str:
    """Three digits; 0 for what is only rounding."""
    return f"{0.0 if abs(value) < 2e-7 else value:.3g}" if isinstance(value, float) else str(value)


def shown(name: str, value: Tensor | np.ndarray, count: int = 4) -> str:
    """A line for a tensor: name, shape, dtype, its first numbers."""
    flat, dtype = value.reshape(-1), str(value.dtype).removeprefix("torch.")
    numbers = [*map(clean, flat[:count].tolist()), *["..."] * (0 < count < len(flat))]
    return " ".join([name, str(tuple(value.shape)), dtype, *numbers])


def compare(folder: Path, algorithm, step, number: int, metrics: dict) -> dict[str, bool]:
    """Which files of the run know the step, and whether they say what the replay says."""
    said = [line for _, line in groups(algorithm, step)] if step.rollout else []
    metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    at, same = (algorithm.stage, number), {}
    for name, lines in (("completions.jsonl", said), ("metrics.jsonl", [metrics])):
        text = (folder / name).read_text() if (folder / name).is_file() else ""
        logged = [line for line in map(json.loads, text.splitlines()) if (line["stage"], line["step"]) == at]
        again = {line.get("row"): line for line in json.loads(json.dumps(lines))}
        if logged:
            same[name] = all(line | again.get(line.get("row"), {"row": None}) == line for line in logged)
    return same


def main(arguments: list[str]) -> int:
    """Replay a step and print what happens to one of its prompts; 1 if a file of the run says something else."""
    parser = argparse.ArgumentParser("python -m minivlmrl replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", help="the folder of a run; or a recipe, with --section.name=value as in training")
    parser.add_argument("--stage", help="by default the last one")
    parser.add_argument("--step", type=int, default=0, help="of the stage, from 0, as in metrics.jsonl")
    parser.add_argument("--prompt", type=int, default=0, help="of the step, from 0")
    options, overrides = parser.parse_known_args(arguments)
    folder, number = Path(options.run), options.step
    if folder.is_dir() and [word for word in overrides if not word.startswith("--num_threads=")]:
        raise ValueError(f"{folder}: a run is replayed as it was; only a recipe takes {overrides[0]}")
    recipe, own = (folder / "config.yaml", [f"--output_dir={folder}"]) if folder.is_dir() else (folder, [])
    config = load_config(recipe, [*own, *overrides])
    algorithm, optimizer, step, rows = go_to(config, options.stage or ["none", *config.stages][-1], number)
    for stop in Walk(algorithm, optimizer, step, rows, number, options.prompt).stops():
        said = (inspect.getdoc(stop.code) or "").partition("\n")[0]
        print(f"{stop.title}: {link(stop.code)}", said, *(f"    {line}" for line in stop.lines), "", sep="\n")
    ranks.shutdown()
    same = compare(folder, algorithm, step, number, stop.data["metrics"])
    other = "something else: another CPU, number of threads or ranks, or version of torch?"
    said = [f"{name} says {'the same' if equal else other}" for name, equal in same.items()]
    print(*said or ["nothing to compare with: no file of a run has this step"], sep="\n")
    return int(not all(same.values()))
