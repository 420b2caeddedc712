"""Check evaluation rows: constant answers must score low, and images must not be training images."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset
from minivlmrl.monitor.check.preflight import rows_trained_on
from minivlmrl.monitor.check.rewards import Trial, check_constant
from minivlmrl.monitor.check.rows import sample_rows, solutions_of
from minivlmrl.rewards.registry import held_out_rewards, required_columns

NUM_DECODED = 1000  # maximum rows whose images are decoded


def check_evaluation(config: RunConfig, datasets: dict[str, Dataset], processor: Processor) -> Iterator[str]:
    """Check evaluation rows, and compare their images with training images."""
    held_out = datasets.get("eval")
    if held_out is None:
        return
    rewards = [reward for reward in held_out_rewards(config) if "solution" in reward.columns]
    no_columns = dict.fromkeys(required_columns(rewards))  # {column: None}, for rows without the column
    rows = []
    for i, row in enumerate(sample_rows(held_out)):
        rows.append(replace(row, key=str(i), columns=no_columns | row.columns))
    trial = Trial(rewards, torch.ones(len(rewards)), rows, processor)
    solutions = solutions_of(held_out)
    if rewards and len(held_out) > 1:
        right_values = trial.score_answers(trial.right_answers())
        yield from check_constant(trial, solutions, right_values, " of the evaluation rows")
    for stage in config.stage_names:
        rows = datasets[stage]
        are_files = isinstance(held_out, FileDataset) and isinstance(rows, FileDataset)
        if not are_files or rows_trained_on(held_out, rows):  # find_mistakes reports such rows
            continue
        held_out_images = pixel_hashes(held_out)
        shared = held_out_images & pixel_hashes(rows)
        if shared:
            yield (
                f"{len(shared)} of {len(held_out_images)} images in the evaluation rows are identical to images in the "
                f"training rows of {stage}, so the evaluation measures memorization of images. Use different images in "
                "data.eval_file."
            )


def pixel_hashes(rows: Dataset) -> set[bytes]:
    """Hash the images in at most 1000 random rows."""
    hashes = set()
    numbers = random.Random(0).sample(range(len(rows)), min(NUM_DECODED, len(rows)))
    for number in numbers:
        with suppress(ValueError):  # other checks report unreadable images
            for image in rows[number].images:
                content = repr(image.size).encode() + image.tobytes()
                hashes.add(hashlib.sha256(content).digest())
    return hashes
