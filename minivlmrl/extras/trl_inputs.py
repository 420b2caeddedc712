"""A callback for TRL's trainers that checks that every image of the first step reaches the loss.

docs/library.md shows how to use it. The callback also works with transformers' own Trainer.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"minivlmrl.extras.trl_inputs needs transformers, but importing it failed ({error}); "
        "run `pip install transformers`"
    ) from error

# arguments of a model: patches, grids of patches; and the name of their token's id in its config
MEDIA = {
    "image": ("pixel_values", "image_grid_thw", "image_token_id"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_token_id"),
}
# outputs of a model from which a loss is computed; the first one that exists is compared
OUTPUTS = ("log_probs", "logits", "loss")
ADVICE = (
    "The training continues, but it does not learn from all images. Check the rows, the collator, "
    "the attention mask and the model."
)


@dataclass
class Forward:
    """A forward pass of the first step whose outputs have a gradient."""

    arguments: dict[str, Any]
    shown: dict[str, Tensor]  # {argument: patches, which get gradients in the backward pass}
    at_text: list[Tensor] = field(default_factory=list)  # gradients at the token embeddings, (B, T)


class InputCheck(TrainerCallback):
    """Warns if an image or a video of the first step does not reach the loss.

    The loss must have a gradient at each image that comes before a token to train on, and the outputs of the model must
    change if the images are gray. The gradients are those of the step itself. The only additional work is two forward
    passes without gradients, which are omitted if the weights are sharded. Weights and random numbers are not changed.

    `problems` has the warnings, or is empty.
    """

    def __init__(self):
        self.problems: list[str] = []
        self.forwards: list[Forward] = []
        self.hooks: list[Any] = []
        self.is_done = False
        self.is_comparing = False  # True while the model runs with other images

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.is_done or self.hooks or model is None:
            return
        embedding = model.get_input_embeddings()
        self.hooks = [
            model.register_forward_pre_hook(self._watch_images, with_kwargs=True),
            embedding.register_forward_hook(self._watch_text),
        ]

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.is_done or model is None:
            return
        self.is_done = True
        for hook in self.hooks:
            hook.remove()
        for forward in self.forwards:
            self.problems += gradient_problems(forward, model.config)
        self.forwards, self.hooks = [], []
        self.problems = list(dict.fromkeys(self.problems))
        for problem in self.problems:
            warnings.warn(f"step {state.global_step}: {problem}. {ADVICE}", stacklevel=2)

    def _watch_images(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple | None:
        if self.is_comparing or not torch.is_grad_enabled():
            return None
        shown = {}
        for kind, (pixels, _, token) in MEDIA.items():
            ids, number = kwargs.get("input_ids"), getattr(model.config, token, None)
            if isinstance(kwargs.get(pixels), Tensor):
                shown[pixels] = kwargs[pixels].detach().clone().requires_grad_()
            elif ids is not None and number is not None and (ids == number).any():
                self.problems.append(f"the tokens have places for {kind}s, but there are no {kind}s")
        if shown and not self.forwards and not is_sharded(model):
            self.is_comparing = True
            try:
                self.problems += gray_problems(model, args, kwargs, list(shown))
            finally:
                self.is_comparing = False
        self.forwards.append(Forward(kwargs, shown))
        return args, kwargs | shown

    def _watch_text(self, embedding: nn.Module, args: tuple, embeds: Tensor):
        if self.is_comparing or not torch.is_grad_enabled() or not self.forwards:
            return
        if not embeds.requires_grad:  # the weights are frozen, for example with LoRA
            embeds.requires_grad_()
        at_text = self.forwards[-1].at_text
        embeds.register_hook(lambda slope: at_text.append(slope.detach().abs().float().sum(-1)))


def is_sharded(model: nn.Module) -> bool:
    """Return True if FSDP or DeepSpeed shards the weights, so that all ranks must run the model."""
    return any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in model.parameters())


def gray_problems(model: nn.Module, args: tuple, kwargs: dict, names: list[str]) -> list[str]:
    """Run the model with its images and with gray images; return a warning if nothing changes."""
    gray = {name: torch.zeros_like(kwargs[name]) for name in names}
    texts = []
    for images in ({}, gray):
        # the same random numbers for both, and for the step as without the callback
        with torch.no_grad(), torch.random.fork_rng():
            texts.append(text_outputs(model(*args, **kwargs | images), model, kwargs.get("input_ids")))
    if torch.equal(*texts):
        return ["the outputs of the model do not change if the images are gray"]
    return []


def text_outputs(outputs: Any, model: nn.Module, ids: Tensor | None) -> Tensor:
    """Return the outputs at all tokens but those of images and videos, from which a loss is computed."""
    output = next((outputs.get(name) for name in OUTPUTS if outputs.get(name) is not None), None)
    if output is None:
        raise ValueError(
            f"the model returns none of {', '.join(OUTPUTS)}, so the check of its images is not "
            "possible; remove the callback InputCheck"
        )
    if ids is None or output.dim() < 2 or ids.shape[1] < output.shape[1]:
        return output
    is_text = torch.ones_like(ids, dtype=torch.bool)
    for _, _, token in MEDIA.values():
        is_text &= ids != getattr(model.config, token, -1)
    # TRL computes the outputs of the last tokens only
    return output[is_text[:, -output.shape[1] :]]


def gradient_problems(forward: Forward, config: Any) -> list[str]:
    """Return a warning for each kind of media at which the loss has no gradient.

    A row without any gradient is ignored, because completions with an advantage of 0 have none.
    """
    problems = []
    for kind, (pixels, grid, token) in MEDIA.items():
        if pixels not in forward.shown:
            continue
        leaf = forward.shown[pixels]
        at_pixels = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        grids = forward.arguments.get(grid)
        sizes = [1] * len(leaf) if grids is None else grids.prod(1).tolist()
        is_seen = seen_media(forward, sizes, getattr(config, token, None))
        parts = at_pixels.split(sizes)
        missing = [i for i, part in enumerate(parts) if is_seen[i] and not part.any()]
        if missing:
            problems.append(
                f"the loss has no gradient at {len(missing)} of {len(sizes)} {kind}s of a "
                f"micro-batch, for example at the {kind} with the index {missing[0]}"
            )
    return problems


def seen_media(forward: Forward, sizes: list[int], token: int | None) -> list[bool]:
    """Return for each image or video whether a token to train on comes after it in its row.

    Args:
        sizes: number of patches of each image or video.
        token: id of its tokens. Without this id, all images count as seen.
    """
    ids = forward.arguments.get("input_ids")
    if ids is None or token is None or not (ids == token).any():
        return [True] * len(sizes)
    labels = forward.arguments.get("labels")
    at_text = torch.stack(forward.at_text).sum(0) if forward.at_text else torch.zeros(ids.shape)
    places = (ids == token).flatten().nonzero()[:, 0]
    is_seen = []
    first = 0  # number of patches before the image; all images have as many patches per token
    for size in sizes:
        row, column = divmod(int(places[first * len(places) // sum(sizes)]), ids.shape[1])
        has_label = labels is None or bool((labels[row, column:] != -100).any())
        is_seen.append(has_label and bool(at_text[row].any()))
        first += size
    return is_seen
