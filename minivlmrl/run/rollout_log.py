"""Log completions to completions.jsonl, one line per prompt.

Fields of a line: stage, step, row (row index), where (file and line), prompt, solution and these:

- images: image paths, relative to the run folder;
- truth: boxes in the solution, [x1, y1, x2, y2] in fractions of image width and height;
- completions: one entry per completion in the group.

Fields of a completion: text, boxes, advantage and these:

- stopped: false if max_new_tokens cut the text;
- answer: the answer that data.answer_format selects, null if there is none;
- rewards: {reward name: value}; reward: weighted sum, with the grpo.soft_punish_cache penalty;
- why: {reward name: reason for its value}, only for rewards that give a reason;
- tokens: [[text, log-probability in nats], ...]; the log-probability is null for tokens from the prompt or a tool;
- pictures: paths of images from an environment;
- extra: other values logged by reward functions;
- turns: for agents, a list of {text, tokens: number of tokens, shown: whether the prompt of the turn has an image}.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import PIL.Image
from tokenizers.decoders import DecodeStream

from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import build
from minivlmrl.data.boxes import Box, parse_boxes
from minivlmrl.data.messages import text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import error_context, require
from minivlmrl.json_files import json_text, parse_json, write_file
from minivlmrl.rewards.columns import image_and_box_sizes
from minivlmrl.rewards.text import find_answer
from minivlmrl.trainers.base import Sample, SampledBatch, Step, Trainer

COMPLETIONS, IMAGES = "completions.jsonl", "images"
NUM_PROMPTS = 4  # prompts per logged step, on rank 0
LONGEST_SIDE = 384  # maximum side of logged images, in pixels


@dataclass
class LogLine:
    """Fields in every line of a log file."""

    stage: str
    step: int


def read_lines(path: Path, form: type) -> list[dict]:
    """Parse the complete lines in a JSON lines file; [] if it does not exist.

    A last line without newline is ignored, because a run may still be writing it.

    Args:
        form: dataclass with the required fields of a line.
    """
    text = path.read_bytes() if path.is_file() else b""
    contents = []
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        with error_context(f"{path}:{number}"):
            content = parse_json(line)
            build(form, content, f"{path}:{number}", json=True)
        contents.append(content)
    return contents


def read_metrics(path: Path) -> list[dict]:
    """Read metrics.jsonl or evaluations.jsonl, checking that values are numbers, or null for NaN."""
    lines = read_lines(path, LogLine)
    for number, line in enumerate(lines, start=1):
        check_numbers(line, f"{path}:{number}")
    return lines


def check_numbers(values: dict, where: str):
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300
        require(is_number or value is None or name == "stage", f"{where}: {name}", value, "a number")


class CompletionsLog:
    """Log completions every log_completions optimizer steps, on rank 0.

    Args:
        write: function that appends a line to completions.jsonl.
        resumed: state folder to resume from, None for a new run.
    """

    def __init__(self, config: RunConfig, world: World, write: Callable[[dict], None], resumed: Path | None):
        self.folder = Path(config.output_dir)
        self.world = world
        self.write = write
        self.every = config.log_completions
        if resumed is None and self.every and world.is_main:
            shutil.rmtree(self.folder / IMAGES, ignore_errors=True)

    def is_due(self, step: Step, number: int) -> bool:
        return bool(self.every) and number % self.every == 0 and step.rollout is not None

    def step(self, trainer: Trainer, step: Step, number: int):
        """Log completions for an optimizer step; all ranks must call this."""
        lines = groups(trainer, step, NUM_PROMPTS if self.world.is_main else 0)
        logged = []
        pictures = {}
        for group, line in zip(step.groups, lines, strict=False):
            row = group[0].row
            for sample, described in zip(group, line["completions"], strict=True):
                paths = described.get("pictures", ())
                for (picture, *_), path in zip(sample.completion.pictures, paths, strict=True):
                    pictures[path] = picture
            images = [f"{IMAGES}/{trainer.stage}-{row.index}-{i}.webp" for i in range(len(row.images))]
            pictures.update(zip(images, row.images, strict=True))
            logged.append({"stage": trainer.stage, "step": number, **line, "images": images})
        for name, image in pictures.items():
            path = self.folder / name
            if not path.is_file():
                path.parent.mkdir(exist_ok=True)
                write_file(path, encode_image(image))
        for line in logged:
            self.write(line)


def encode_image(image: PIL.Image.Image) -> bytes:
    small = image.copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    buffer = BytesIO()
    small.save(buffer, "WEBP", quality=90, lossless=max(small.size) < 128)
    return buffer.getvalue()


def groups(trainer: Trainer, step: Step, limit: int | None = None) -> list[dict]:
    """Return the lines of completions.jsonl for this rank's first `limit` prompts, without the field `images`."""
    advantages = {}  # {sample index: advantage}
    for batch in step.micro_batches:
        if isinstance(batch, SampledBatch):
            advantages.update(zip(batch.completion_index.tolist(), batch.completion_advantages(), strict=True))
    return [describe_group(trainer, group, advantages) for group in step.groups[:limit]]


def describe_group(trainer: Trainer, group: list[Sample], advantages: dict[int, float]) -> dict:
    row = group[0].row
    processor = trainer.processor
    image_size, answer_extent = image_and_box_sizes(row, group[0].prompt, processor)
    solution = row.columns.get("solution")
    true_boxes = boxes(solution if isinstance(solution, str) else json_text(solution), image_size)
    lines = []
    for g, (sample, total) in enumerate(zip(group, trainer.total_rewards(group).tolist(), strict=True)):
        completion = sample.completion
        text = processor.decode_assistant_turn(completion)
        extra = {**completion.extra}
        line = {
            "text": text,
            "answer": find_answer(text, processor.answer_format),
            "rewards": dict(zip(trainer.config.rewards, sample.rewards.tolist(), strict=True)),
            "why": extra.pop("why", {}),
            "reward": total,
            "advantage": advantages.get(sample.index, 0.0),  # 0 for samples left out of training
            "stopped": completion.stopped,
            "tokens": list(tokens(completion, processor)),
            "boxes": boxes(text, answer_extent) if true_boxes else [],
        }
        if extra:
            line["extra"] = extra
        if completion.turns:
            line["turns"] = [
                {
                    "text": processor.decode_assistant_turn(turn),
                    "tokens": len(turn.ids),
                    "shown": bool(turn.prompt and turn.prompt.row and turn.prompt.row.images),
                }
                for turn in completion.turns
            ]
        if completion.pictures:
            name = f"{IMAGES}/{row.key.replace('/', '-')}-{g}"
            line["pictures"] = [f"{name}-{i}.webp" for i in range(len(completion.pictures))]
        lines.append(line)
    return {
        "row": row.index,
        "where": row.where,
        "prompt": "\n".join(map(text_of, row.messages)).strip(),
        "solution": solution,
        "truth": true_boxes,
        "completions": lines,
    }


def boxes(text: str, extent: tuple[float, float] | None) -> list[list[float]]:
    """Find boxes [x1, y1, x2, y2] in a text, in fractions of image width and height.

    Args:
        extent: image (width, height) in box units; None returns [].
    """
    if extent is None:
        return []
    parsed = [Box(*corners, extent) for corners in parse_boxes(find_answer(text) or text)]
    fractions = [box.to((1.0, 1.0)) for box in parsed if box.valid]
    return [[box.x1, box.y1, box.x2, box.y2] for box in fractions]


def tokens(completion: Completion, processor: Processor) -> Iterator[tuple[str, float | None]]:
    """Yield (text, log-probability in nats) per token in a completion."""
    if processor.template.generation_prefix:
        yield processor.template.generation_prefix, None
    stream = DecodeStream(skip_special_tokens=False)
    assert completion.logps is not None
    columns = (column.tolist() for column in (completion.ids, completion.logps, completion.policy_mask))
    for token_id, logp, by_policy in zip(*columns, strict=True):
        # text is "" if a character needs further tokens
        text = stream.step(processor.tokenizer.backend, token_id) or ""
        yield text, round(logp, 4) if by_policy else None
