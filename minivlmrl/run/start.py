"""What a run does and says before its first step: it tries the rewards, counts the rows, says what runs where."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from minivlmrl.data.row_summary import summary
from minivlmrl.generate import Completion
from minivlmrl.hub.checkpoint import DTYPES
from minivlmrl.image import ImageProcessor
from minivlmrl.kernels.backend import backend_for
from minivlmrl.reward_functions.names import required_columns
from minivlmrl.rewards import judge
from minivlmrl.rows import Dataset, Processor, Prompt, Row
from minivlmrl.scale.ranks import World

INVENTED = "<think>invented</think><answer>to try the rewards</answer>"


class Inventor(Processor):
    """A processor without a tokenizer, for a completion that no model has said."""

    def decode(self, ids: torch.Tensor) -> str:
        return INVENTED


def try_rewards(config, needs: dict[str, str], datasets: dict[str, Dataset]):
    """Ask the rewards about an invented completion: one that fails (ValueError) does so now, not after the weights.

    Args:
        needs: for each stage what its rows must have, a key of batches.NEEDS.
    """
    for stage, rows in datasets.items():
        if stage == "eval":
            columns = dict.fromkeys(required_columns(config.data.eval_rewards))
            _try(config.data.eval_rewards, replace(rows[0], columns=columns | rows[0].columns))
        elif needs[stage] == "prompts":
            _try(config.rewards, rows[0])


def _try(rewards: Collection[str], row: Row):
    patches = [[1, max(1, image.height // 14), max(1, image.width // 14)] for image in row.images]
    grids = torch.tensor(patches, dtype=torch.long).view(-1, 3)
    prompt = Prompt(torch.zeros(1, dtype=torch.long), torch.zeros(0, 1176), grids, torch.zeros(len(grids)))
    completion = Completion(torch.arange(3), torch.zeros(3), True)
    judge(rewards, [row], [prompt], [[completion]], Inventor(None, ImageProcessor()), lambda *_: [0.0])


def show_rows(datasets: dict[str, Dataset], processor: Processor, world: World):
    """Print how many rows have how many images and how long prompts are; image files are opened, not decoded."""
    said = {}
    for name, rows in datasets.items() if world.is_main else ():
        said.setdefault(summary(rows, processor), []).append(name)
    for text, names in said.items():
        print(f"rows of {', '.join(names)}: {text}", flush=True)


def describe_run(config, model: nn.Module, world: World):
    """Print on the first rank what runs where, and what it writes to."""
    if not world.is_main:
        return
    dtype, compute_dtype = config.model.dtype, config.model.compute_dtype or config.model.dtype
    kernels = backend_for(torch.empty(0, dtype=DTYPES[compute_dtype], device=world.device))
    cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if cuda else f"CPU (threads: {torch.get_num_threads()})"
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"device: {device}; ranks: {world.size}; kernels: {kernels}")
    print(f"model: {count:,} parameters in {dtype}, computed in {compute_dtype}")
    print(f"output: {config.output_dir}", flush=True)
