"""completions.jsonl: what the policy wrote in training, a line for each prompt and its group.

A line has stage, step, row (its number in the dataset), prompt, solution, images (files in the
run's folder), truth (boxes), and completions: text, rewards by name, reward (their weighted sum),
advantage, stopped, boxes, and tokens [[text, log-probability in nats], ...]. Boxes are [x1, y1, x2,
y2] in shares of the image's width and height. What a prompt opened or an environment forced has
no log-probability, and a completion with pictures names them: pictures. What rewards log of a
completion is its extra. A trajectory has turns: text, tokens (how many), and shown, whether its
window has a picture: the newest one is the next of pictures, of the first turn the row's.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import torch
from tokenizers.decoders import DecodeStream

from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import json_text
from minivlmrl.data.boxes import Box, box_columns, parse_boxes
from minivlmrl.data.messages import content_parts
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.files import read_lines
from minivlmrl.losses.advantages import combine
from minivlmrl.rewards.text import find_answer
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Rollout, SampledBatch, Step, Trainer

COMPLETIONS, IMAGES = "completions.jsonl", "images"
GROUPS = 4  # prompts of a step that are logged, the first ones of the first rank
LONGEST_SIDE = 384  # pixels of an image that is saved here


@dataclass
class LogLine:
    """What every line that a step writes begins with."""

    stage: str
    step: int


class CompletionsLog:
    """Writes what every log_completions-th optimizer step trains on, on the first rank; 0: never.

    A resumed run drops what an earlier attempt wrote of steps that come again.
    """

    def __init__(self, config: RunConfig, world: World, progress: TrainerState):
        self.folder = Path(config.output_dir)
        self.every = config.log_completions if world.is_main else 0
        if not self.every:
            return
        self.path = self.folder / COMPLETIONS
        num_bytes = 0  # of the lines that stay
        if not progress.steps:
            shutil.rmtree(self.folder / IMAGES, ignore_errors=True)
        elif self.path.is_file():
            lines = self.path.read_bytes().splitlines(keepends=True)
            num_past = sum(is_past(line, progress) for line in read_lines(self.path, LogLine))
            num_bytes = sum(len(line) for line in lines[:num_past])
        self.path.touch()
        os.truncate(self.path, num_bytes)  # in place: a kill now or a full disk loses nothing

    def step(self, trainer: Trainer, step: Step, number: int):
        """Record an optimizer step, if it is due and trains on a rollout."""
        if not self.every or number % self.every or step.rollout is None:
            return
        lines = []
        logged = zip(step.prompts[:GROUPS], groups(trainer, step), strict=False)
        for prompt_index, line in logged:
            row = step.rollout.rows[prompt_index]
            completions = step.rollout.completions[prompt_index]
            for completion, described in zip(completions, line["completions"], strict=True):
                paths = described.get("pictures", ())
                for (picture, *_), path in zip(completion.pictures, paths, strict=True):
                    self.save(picture, path)
            images = []
            for i, image in enumerate(row.images):
                path = f"{IMAGES}/{trainer.stage}-{row.index}-{i}.webp"
                self.save(image, path)
                images.append(path)
            lines.append({"stage": trainer.stage, "step": number, **line, "images": images})
        with self.path.open("ab") as file:
            file.writelines(f"{json_text(line)}\n".encode() for line in lines)

    def save(self, image: PIL.Image.Image, name: str):
        """Save an image, scaled down, unless it is there, at its path from the run's folder."""
        path = self.folder / name
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            small = image.copy()
            small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            draft = path.with_suffix(".partial")  # killed now it is no picture that is there
            small.save(draft, "WEBP", quality=90, lossless=max(small.size) < 128)
            draft.rename(path)


def is_past(line: dict, progress: TrainerState) -> bool:
    """Say whether a line is of a step that a resumed run does not repeat."""
    is_done = line["stage"] in progress.stages[: progress.stage]
    is_present = line["stage"] == progress.stages[progress.stage]
    return is_done or (is_present and line["step"] < progress.step)


def groups(trainer: Trainer, step: Step) -> Iterator[dict]:
    """Yield the line but images of each group of this rank that a step trains on."""
    if step.rollout is None:
        return
    G = trainer.config.num_generations
    advantages = completion_advantages(step)
    for index in step.prompts:
        group = [advantages.get(index * G + g, 0.0) for g in range(G)]  # 0: left out
        yield describe_group(trainer, step.rollout, index, group)


def completion_advantages(step: Step) -> dict[int, float]:
    """Map the index of each completion that is trained on to its advantage, PPO's to their mean."""
    means = {}
    for batch in step.micro_batches:
        if not isinstance(batch, SampledBatch):
            continue
        advantages = batch.advantages.view(len(batch.loss_mask), -1)  # (R, 1), or PPO's (R, T)
        mask = batch.loss_mask if advantages.shape[1] > 1 else torch.ones_like(advantages)
        row_means = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)  # (R,)
        means.update(zip(batch.completion_index.tolist(), row_means.tolist(), strict=True))
    return means


def describe_group(trainer: Trainer, rollout: Rollout, index: int, advantages: list[float]) -> dict:
    """Say of a prompt and its G completions all but the images: see the file's docstring."""
    row = rollout.rows[index]
    processor = trainer.processor
    reward_weights = trainer.run.rewards
    group = rollout.completions[index]
    G = len(group)
    rewards = rollout.rewards[index * G : (index + 1) * G]  # (G, K)
    totals = combine(rewards, torch.tensor(list(reward_weights.values()))).tolist()
    columns = box_columns([row], [rollout.prompts[index]], processor, 1)
    [image_size] = columns["image_sizes"]
    [answer_extent] = columns["answer_extents"]
    solution = row.columns.get("solution")
    solution_text = solution if isinstance(solution, str) else json.dumps(solution)
    true_boxes = boxes(solution_text, image_size)
    lines = []
    for g, completion in enumerate(group):
        text = processor.decode_assistant_turn(completion)
        line = {
            "text": text,
            "rewards": dict(zip(reward_weights, rewards[g].tolist(), strict=True)),
            "reward": totals[g],
            "advantage": advantages[g],
            "stopped": completion.stopped,
            "tokens": list(tokens(completion, processor)),
            "boxes": boxes(text, answer_extent) if true_boxes else [],
        }
        if completion.extra:
            line["extra"] = completion.extra
        if completion.turns:
            line["turns"] = [describe_turn(turn, processor) for turn in completion.turns]
        if completion.pictures:
            name = f"{IMAGES}/{row.key.replace('/', '-')}-{g}"
            line["pictures"] = [f"{name}-{i}.webp" for i in range(len(completion.pictures))]
        lines.append(line)
    prompt_texts = []
    for message in row.messages:
        prompt_texts += [part.get("text") or "" for part in content_parts(message)]
    return {
        "row": row.index,
        "where": row.where,
        "prompt": "\n".join(prompt_texts).strip(),
        "solution": solution,
        "truth": true_boxes,
        "completions": lines,
    }


def describe_turn(turn: Completion, processor: Processor) -> dict:
    """Say of a turn what report.html shows beside its tokens."""
    row = turn.prompt.row if turn.prompt is not None else None
    return {
        "text": processor.decode_assistant_turn(turn),
        "tokens": len(turn.ids),
        "shown": row is not None and len(row.images) > 0,
    }


def boxes(text: str, extent: tuple[float, float] | None) -> list[list[float]]:
    """Read the boxes of a text, in shares of the image's sides; none without an image."""
    if extent is None:
        return []
    written = [Box(*corners, extent) for corners in parse_boxes(find_answer(text) or text)]
    shares = [box.to((1.0, 1.0)) for box in written if box.valid]
    return [[box.x1, box.y1, box.x2, box.y2] for box in shares]


def tokens(completion: Completion, processor: Processor) -> Iterator[tuple[str, float | None]]:
    """Yield text and log-probability of each token; a character of several is with the last.

    First what the prompt has opened of the answer, without a log-probability.
    """
    if processor.template and processor.template.opened:
        yield processor.template.opened, None
    stream = DecodeStream(skip_special_tokens=False)
    assert completion.logps is not None  # the sampler records them
    token_ids = completion.ids.tolist()
    logps = completion.logps.tolist()
    is_written = completion.policy_mask.tolist()
    for token_id, logp, by_policy in zip(token_ids, logps, is_written, strict=True):
        text = stream.step(processor.tokenizer.backend, token_id) or ""
        yield text, round(logp, 4) if by_policy else None
