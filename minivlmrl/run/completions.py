"""completions.jsonl: what the policy wrote in training, a line for each prompt and its group.

A line has stage, step, row (its number in the dataset), prompt, solution, images (files in the
run's folder), truth (boxes), and completions: text, rewards by name, reward (their weighted sum),
advantage, stopped, boxes, and tokens [[text, log-probability in nats], ...]. Boxes are [x1, y1, x2,
y2] in shares of the image's width and height. What a prompt opened or an environment forced has
no log-probability, and a completion with pictures names them: pictures.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers.decoders import DecodeStream

from minivlmrl.advantages import combine
from minivlmrl.algorithms.base import Algorithm
from minivlmrl.batch import Step
from minivlmrl.chat import content_parts
from minivlmrl.grpo import Rollout
from minivlmrl.hub.folder import json_text, read_lines
from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.reward_functions.box_rewards import box_columns, read_boxes
from minivlmrl.rows import Completion, Row
from minivlmrl.scale.ranks import World

COMPLETIONS, IMAGES = "completions.jsonl", "images"
GROUPS = 4  # prompts of a logged step: the first ones of the first rank
LONGEST_SIDE = 384  # pixels of an image that is saved here


@dataclass
class Logged:
    """What every line that a step writes begins with."""

    stage: str
    step: int


class CompletionsLog:
    """Writes what every log_completions-th optimizer step trains on, on the first rank; 0: never.

    A resumed run drops what an earlier attempt wrote of steps that come again.
    """

    def __init__(self, config, world: World, progress):
        self.folder = Path(config.output_dir)
        self.every = config.log_completions if world.is_main else 0
        if not self.every:
            return
        self.path = self.folder / COMPLETIONS
        kept = b""
        if not progress.steps:
            shutil.rmtree(self.folder / IMAGES, ignore_errors=True)
        elif self.path.is_file():
            past = [is_past(line, progress) for line in read_lines(self.path, Logged)]
            kept = b"".join(self.path.read_bytes().splitlines(keepends=True)[: sum(past)])
        self.path.touch()
        os.truncate(self.path, len(kept))  # in place: a kill now or a full disk loses nothing

    def step(self, algorithm: Algorithm, step: Step, number: int):
        """Record an optimizer step, if it is due and trains on a rollout."""
        if not self.every or number % self.every or step.rollout is None:
            return
        lines = []
        some = islice(groups(algorithm, step), GROUPS)
        for index, (row, line) in zip(step.prompts, some, strict=False):
            group = step.rollout.completions[index]
            paths = [path for one in line["completions"] for path in one.get("pictures", ())]
            pictures = [picture for completion in group for picture, *_ in completion.pictures]
            for path, picture in zip(paths, pictures, strict=True):
                self.save(picture, Path(path).stem)
            name = f"{algorithm.stage}-{row.index}"
            images = [self.save(image, f"{name}-{i}") for i, image in enumerate(row.images)]
            lines.append({"stage": algorithm.stage, "step": number} | line | {"images": images})
        with self.path.open("ab") as file:
            file.writelines(f"{json_text(line)}\n".encode() for line in lines)

    def save(self, image, name: str) -> str:
        """Save an image, scaled down, unless it is there; return its path from the run's folder."""
        path = self.folder / IMAGES / f"{name}.webp"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            small = image.copy()
            small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            draft = path.with_suffix(".partial")  # killed now it is no picture that is there
            small.save(draft, "WEBP", quality=90, lossless=max(small.size) < 128)
            draft.rename(path)
        return f"{IMAGES}/{path.name}"


def is_past(line: dict, progress) -> bool:
    """Say whether a line is of a step that a resumed run does not repeat."""
    done = progress.stages[: progress.stage]
    now = progress.stages[progress.stage]
    return line["stage"] in done or (line["stage"] == now and line["step"] < progress.step)


def groups(algorithm: Algorithm, step: Step) -> Iterator[tuple[Row, dict]]:
    """Yield each group of this rank that a step trains on: its row, and its line but images."""
    # 0: left out
    rollout = step.rollout
    G = algorithm.config.num_generations
    means = {}
    for batch in step.micro_batches:
        # (R, 1), or PPO's (R, T), of which the mean counts
        advantages = batch.advantages.view(len(batch.loss_mask), -1)
        mask = batch.loss_mask if advantages.shape[1] > 1 else torch.ones_like(advantages)
        mean = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        means |= zip(batch.completion_index.tolist(), mean.tolist(), strict=True)
    for index in step.prompts:
        advantages = [means.get(index * G + g, 0.0) for g in range(G)]
        yield rollout.rows[index], describe(algorithm, rollout, index, advantages)


def describe(algorithm: Algorithm, rollout: Rollout, index: int, advantages: list[float]) -> dict:
    """Say of a prompt and its G completions all but the images: see the file's docstring."""
    row = rollout.rows[index]
    processor = algorithm.processor
    weights = algorithm.run.rewards
    group = rollout.completions[index]
    rewards = rollout.rewards[index * len(group) :][: len(group)]
    total = combine(rewards, torch.tensor(list(weights.values()))).tolist()
    [size], [extent] = box_columns([row], [rollout.prompts[index]], processor, 1).values()
    opened = [(text, None) for text in [processor.template and processor.template.opened] if text]
    solution = row.columns.get("solution")
    lines = []
    truth = boxes(solution if isinstance(solution, str) else json.dumps(solution), size)
    for g, completion in enumerate(group):
        text = processor.turn(completion)
        line = {"text": text, "rewards": dict(zip(weights, rewards[g].tolist(), strict=True))}
        line |= {"reward": total[g], "advantage": advantages[g], "stopped": completion.stopped}
        line["tokens"] = [*opened, *tokens(completion, processor.tokenizer)]
        line["boxes"] = boxes(text, extent) if truth else []
        if completion.pictures:
            name = f"{IMAGES}/{row.key.replace('/', '-')}-{g}"
            line["pictures"] = [f"{name}-{i}.webp" for i in range(len(completion.pictures))]
        lines.append(line)
    parts = [part.get("text") or "" for m in row.messages for part in content_parts(m)]
    about = {"row": row.index, "where": row.where, "prompt": "\n".join(parts).strip()}
    return about | {"solution": solution, "truth": truth, "completions": lines}


def boxes(text: str, extent: tuple[float, float] | None) -> list[list[float]]:
    """Read the boxes of a text, in shares of the image's sides; none without an image."""
    written = read_boxes(text, extent) if extent else []
    shares = [box.to((1.0, 1.0)) for _, box in written if box.valid]
    return [[box.x1, box.y1, box.x2, box.y2] for box in shares]


def tokens(completion: Completion, tokenizer: Tokenizer) -> Iterator[tuple[str, float | None]]:
    """Yield text and log-probability of each token; a character of several is with the last."""
    stream = DecodeStream(skip_special_tokens=False)
    of = completion.ids, completion.logps, completion.written
    for token_id, logp, written in zip(*(x.tolist() for x in of), strict=True):
        text = stream.step(tokenizer.backend, token_id) or ""
        yield text, round(logp, 4) if written else None
