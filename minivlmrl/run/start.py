"""What a run does and says before its first step: it tries the rewards, counts the rows, says what runs where."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import PIL.Image
import torch
from torch import nn

from minivlmrl.data.fetch import open_image
from minivlmrl.data.json_lines import JsonLines
from minivlmrl.generate import Completion
from minivlmrl.hub.checkpoint import DTYPES
from minivlmrl.image import ImageProcessor
from minivlmrl.kernels.backend import backend_for
from minivlmrl.reward_functions.names import required_columns
from minivlmrl.rewards import judge
from minivlmrl.rows import Dataset, Processor, Prompt, Row
from minivlmrl.scale.ranks import World

INVENTED = "<think>invented</think><answer>to try the rewards</answer>"
SAMPLE = 64  # rows whose prompts are laid out to say how long prompts are


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


class Sizes(ImageProcessor):
    """Tells how many tokens an image has, and leaves its pixels alone."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
        return torch.zeros(0, self.patch_dim), (1, height // self.patch_size, width // self.patch_size)


def show_rows(datasets: dict[str, Dataset], processor: Processor, world: World):
    """Print how many rows have how many images and how long prompts are; image files are opened, not decoded."""
    said = {}
    for name, rows in datasets.items() if world.is_main else ():
        said.setdefault(summary(rows, processor), []).append(name)
    for text, names in said.items():
        print(f"rows of {', '.join(names)}: {text}", flush=True)


def summary(rows: Dataset, processor: Processor) -> str:
    """Example: "1204, 1200 with 1 image and 4 with none; prompts of 212 to 580 tokens (64 of them)"."""
    counter = replace(processor, image_processor=Sizes(**vars(processor.image_processor)))
    numbers = sorted({len(rows) * i // SAMPLE for i in range(SAMPLE)})
    sample = [row for row in (outline(rows, i) for i in numbers) if row is not None]
    if isinstance(rows, JsonLines):
        media = [Counter(one.kind for one in media) for _, _, media in rows.rows]
        counts = Counter(_words(kinds["image"], kinds["video"]) for kinds in media)
    else:  # all rows of an embedded task are alike
        counts = {_words(len(sample[0].images), 0): len(rows)}
    shown = ", ".join(f"{count} with {words}" for words, count in sorted(counts.items()))
    lengths = sorted(len(row.prompt(counter).input_ids) for row in sample)
    if not lengths:
        return f"{len(rows)}, {shown}"
    of = f" ({len(lengths)} of them)" if len(lengths) < len(rows) else ""
    return f"{len(rows)}, {shown}; prompts of {lengths[0]} to {lengths[-1]} tokens{of}"


def outline(rows: Dataset, index: int) -> Row | None:
    """A row with blank images of the sizes that the headers of its files say; None: it has videos or URLs."""
    if not isinstance(rows, JsonLines):
        return rows[index]
    _, row, media = rows.rows[index]
    if any(one.kind == "video" or one.source.startswith(("http://", "https://")) for one in media):
        return None
    blank = []
    for one in media:
        with open_image(one.source, rows.path.parent) as image:
            blank.append(PIL.Image.new("L", image.size))
    return replace(row, images=blank, where=str(rows.path))


def _words(images: int, videos: int) -> str:
    kinds = {"image": images, "video": videos}
    return " and ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items() if count) or "no image"


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
