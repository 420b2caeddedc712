"""Check in the first step of a TRL or transformers trainer that outputs depend on all images.

docs/library.md explains how to use `InputCheck`.
"""

import warnings
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from minivlmrl.errors import UserError

# {kind: (pixel argument, grid argument, config field with the placeholder token id)}
MEDIA = {
    "image": ("pixel_values", "image_grid_thw", "image_token_id"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_token_id"),
}
OUTPUTS = ("log_probs", "logits", "loss")
MOST_IMAGES = 8  # maximum images to test per row, one at a time
ADVICE = (
    "The training continues, but it does not learn from all images. Check the rows, the collator, "
    "the attention mask and the model."
)


class InputCheck(TrainerCallback):
    """Warn in the first step if the model ignores an image or video, or if a trained parameter gets no gradient.

    Outputs of the first micro-batch are compared with those for gray images, in up to nine forward passes. If FSDP or
    DeepSpeed shards the weights, InputCheck only reports image placeholders in batches without images. InputCheck
    changes no weights and no random state. The attribute `problems` lists the warnings.
    """

    def __init__(self):
        self.problems: list[str] = []
        self.trained: set[str] = set()
        self.reached: set[str] = set()  # names of parameters with a gradient
        self.hooks: list[Any] = []
        self.is_done = False
        self.has_media = False
        self.is_comparing = False  # whether the current forward pass is a test with gray images

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Register hooks for the first forward and backward pass."""
        if self.is_done or self.hooks or model is None:
            return
        self.hooks = [model.register_forward_pre_hook(self._look, with_kwargs=True)]
        if not is_sharded(model):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self.trained.add(name)
                    self.hooks.append(parameter.register_hook(lambda _, name=name: self.reached.add(name)))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Warn about the problems of the first step."""
        if self.is_done or model is None:
            return
        self.is_done = True
        for hook in self.hooks:
            hook.remove()
        missing = sorted(self.trained - self.reached)
        if missing and self.has_media:
            self.problems.append(
                f"{len(missing)} of {len(self.trained)} trained parameters get no gradient, for example {missing[0]}"
            )
        self.problems = list(dict.fromkeys(self.problems))
        for problem in self.problems:
            warnings.warn(f"step {state.global_step}: {problem}. {ADVICE}", stacklevel=2)

    def _look(self, model: nn.Module, args: tuple, kwargs: dict):
        """Compare the first batch with gray images."""
        if self.is_comparing or not torch.is_grad_enabled():
            return
        shown = []
        for kind, (pixels, _, token) in MEDIA.items():
            ids = kwargs.get("input_ids")
            number = getattr(model.config, token, None)
            if isinstance(kwargs.get(pixels), Tensor):
                shown.append(kind)
            elif ids is not None and number is not None and (ids == number).any():
                self.problems.append(f"the tokens have placeholders for {kind}s, but there are no {kind}s")
        if shown and not self.has_media and not is_sharded(model):
            self.is_comparing = True
            try:
                self.problems += gray_problems(model, args, kwargs, shown)
            finally:
                self.is_comparing = False
        self.has_media = self.has_media or bool(shown)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP or DeepSpeed shards the weights."""
    return any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())


def gray_problems(model: nn.Module, args: tuple, kwargs: dict, kinds: list[str]) -> list[str]:
    """Return a warning if images or videos can be made gray without changing the outputs."""

    def outputs(**changed: Tensor) -> Tensor:
        # fork_rng: same dropout masks
        with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
            return text_outputs(model(*args, **kwargs | changed), model, kwargs.get("input_ids"))

    problems = []
    original = outputs()
    for kind in kinds:
        pixels, grid, token = MEDIA[kind]
        grids = kwargs.get(grid)
        sizes = [1] * len(kwargs[pixels]) if grids is None else grids.prod(1).tolist()
        unseen = []
        for images in rounds_of_media(kwargs, sizes, getattr(model.config, token, None)):
            parts = list(kwargs[pixels].split(sizes))
            for image, _ in images:
                parts[image] = torch.zeros_like(parts[image])
            changed = outputs(**{pixels: torch.cat(parts)}) != original
            # a scalar loss does not show which row changed
            by_row = changed.flatten(1).any(1) if changed.dim() > 1 else changed.any().expand(len(sizes))
            unseen += [image for image, row in images if not (by_row.any() if row is None else by_row[row])]
        if unseen:
            problems.append(
                f"the outputs of the model do not change if {len(unseen)} of {len(sizes)} {kind}s of a micro-batch are "
                f"gray, for example the {kind} with the index {min(unseen)}"
            )
    # autocast caches weights, which get no gradients if they were cached under no_grad
    torch.clear_autocast_cache()
    return problems


def text_outputs(outputs: Any, model: nn.Module, ids: Tensor | None) -> Tensor:
    """Return log-probabilities, logits or loss, with zeros at image and video tokens."""
    output = next((outputs.get(name) for name in OUTPUTS if outputs.get(name) is not None), None)
    if output is None:
        raise UserError(f"the model returns none of {', '.join(OUTPUTS)}, so remove the callback InputCheck")
    if ids is None or output.dim() < 2 or ids.shape[1] < output.shape[1]:
        return output
    is_media = torch.zeros_like(ids, dtype=torch.bool)
    for _, _, token in MEDIA.values():
        is_media |= ids == getattr(model.config, token, -1)
    # TRL may request outputs for the last tokens only
    is_media = is_media[:, -output.shape[1] :]
    return output.masked_fill(is_media.view(*is_media.shape, *[1] * (output.dim() - 2)), 0)


def rounds_of_media(arguments: dict, sizes: list[int], token: int | None) -> list[list[tuple[int, int | None]]]:
    """Group images or videos of different rows, for one forward pass per group.

    Args:
        sizes: patches per image.
    Returns:
        groups as lists of (image index, row index). Without placeholders in input_ids, one group has all images, with
        row index None. Images after the last trained token are left out, because they cannot change the loss
    """
    ids = arguments.get("input_ids")
    if ids is None or token is None or not (ids == token).any():
        return [[(image, None) for image in range(len(sizes))]]
    labels = arguments.get("labels")
    places = (ids == token).flatten().nonzero()[:, 0]
    rows: dict[int, list[tuple[int, int | None]]] = {}
    first = 0  # number of patches before this image
    for image, size in enumerate(sizes):
        row, column = divmod(int(places[first * len(places) // sum(sizes)]), ids.shape[1])
        if labels is None or (labels[row, column:] != -100).any():
            rows.setdefault(row, []).append((image, row))
        first += size
    rounds = zip_longest(*(images[:MOST_IMAGES] for images in rows.values()))
    return [[image for image in images if image is not None] for images in rounds]
