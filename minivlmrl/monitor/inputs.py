"""Check in the first step that the loss depends on all images and texts."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.chat_template import find_missing_text
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import encode_answer
from minivlmrl.data.rows import Prompt
from minivlmrl.errors import error_phase
from minivlmrl.model.decoder import TextModel
from minivlmrl.model.packing import GroupBatch
from minivlmrl.run.callbacks import Watcher
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.trainers.base import MicroBatch, Step, Trainer

ADVICE = (
    "The run continues, but it does not learn from all inputs. Check the trainer, the collator and "
    "the model, if they are yours, and otherwise report this warning."
)


class InputCheck(Watcher):
    """Warn if the loss in a stage's first step ignores an image or a text."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.log = log
        self.checked_stages = set()

    def on_step_begin(self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches):
        if trainer.stage in self.checked_stages:
            return
        self.checked_stages.add(trainer.stage)
        with error_phase("forward"):
            found = trainer.world.run_on_all_ranks(partial(check_inputs, trainer, step))
        warnings = trainer.world.gather_objects(found)
        if trainer.world.is_main:
            for warning in dict.fromkeys(sentence for part in warnings for sentence in part):
                self.log.warn(trainer.stage, number, warning, number)


def check_inputs(trainer: Trainer, step: Step) -> list[str]:
    """Return one warning per input problem, such as an image that does not affect the loss.

    Tokens and image patches must match the data file. Without FSDP, the loss must also have nonzero gradients
    for most tokens in a text and most patches in an image.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for batch in step.micro_batches:
        problems = list(compare_with_rows(trainer, batch.group))
        if not trainer.config.uses_fsdp:
            problems += check_gradients(trainer, batch)
        for prompt, problem in problems:
            found[problem].append(prompt.row.name if prompt.row else "a prompt")
    warnings = []
    for problem, rows in found.items():
        more = f" (and {len(rows) - 1} more)" if rows[1:] else ""
        warnings.append(f"{rows[0]}{more}: {problem}. {ADVICE}")
    return warnings


@dataclass
class Part:
    """Position in a packed batch: a prompt or completion, and its images."""

    prompt: Prompt
    is_prompt: bool
    span: slice  # token positions in the packed batch, without a completion's last token
    images: list[tuple[int, range]]  # per image: (first token position, patch indices)


def parts_of(group: GroupBatch) -> Iterator[Part]:
    """Yield where prompts and completions are in a packed batch."""
    ends = [0, *group.image_grid_thw.prod(1).cumsum(0).tolist()]
    merged = ends[-1] // max(len(group.vision_index), 1)  # patches per image token
    images = []
    for begin, end in pairwise(ends):
        first_token = int(group.vision_index[begin // merged])
        images.append((first_token, range(begin, end)))
    layout = group.layout
    for prompt, first, others in zip(group.prompts, layout.prompt_spans, layout.completion_spans, strict=True):
        for span in (first, *others):
            own = [image for image in images if image[0] in span]
            yield Part(prompt, span is first, slice(span.start, span.stop), own)


def check_gradients(trainer: Trainer, batch: MicroBatch) -> Iterator[tuple[Prompt, str]]:
    """Yield (prompt, problem) for texts and images whose loss gradient is mostly zero."""
    group = batch.group
    at_images, at_inputs = run_loss(trainer, batch)
    at_texts = at_inputs.index_fill(0, group.vision_index.cpu(), torch.nan)
    for part in parts_of(group):
        slopes = []
        own = at_texts[part.span]
        # skip prompts without any gradient: all their advantages may be 0
        if part.is_prompt and (trainer.answers or own.nansum()):
            slopes.append(("the text of the prompt", own[~own.isnan()]))
        for position, patches in part.images:
            # skip images after the last token with a loss, which have no gradient
            if at_texts[position : part.span.stop].nansum():
                slopes.append(("an image", at_images[list(patches)]))
        for name, values in slopes:
            num_zeros = int((values == 0).sum())
            if num_zeros * 2 > len(values):
                most = "most of " * (num_zeros < len(values))
                yield part.prompt, f"the loss has no gradient at {most}{name}"


def run_loss(trainer: Trainer, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return absolute loss gradients for image patches and input embeddings, summed over features."""
    name = "pixel_values" if batch.group.vision_embeds is None else "vision_embeds"
    leaves: list[Tensor] = [getattr(batch.group, name).detach().clone().requires_grad_()]

    def keep_input(module: nn.Module, arguments: tuple) -> tuple:
        x = arguments[0]
        leaves.append(x if x.requires_grad else x.detach().requires_grad_())
        return (leaves[-1], *arguments[1:])

    def add_states(module: nn.Linear, arguments: tuple, values: Tensor) -> Tensor | None:
        # a new value head has zero weights, which would block the gradient
        if module.weight.any():
            return None
        return values + arguments[0].mean(-1, keepdim=True)

    with ExitStack() as stack:
        for module in {*trainer.trained.modules(), *trainer.policy.modules()}:
            for weight in module.parameters(recurse=False):
                stack.callback(weight.requires_grad_, weight.requires_grad)
                weight.requires_grad_(False)
            if isinstance(module, TextModel):
                stack.callback(module.register_forward_pre_hook(keep_input).remove)
            elif type(module).__name__ == "ValueHead":  # compared by name, to avoid an import
                stack.callback(module.register_forward_hook(add_states).remove)
        group = replace(batch.group, **{name: leaves[0]})
        loss, _ = trainer.training_loss(replace(batch, group=group))
        slopes: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
    sizes = []
    for x, slope in zip(leaves, slopes, strict=True):
        sizes.append(torch.zeros(len(x)) if slope is None else slope.abs().float().sum(-1).cpu())
    at_images, *at_inputs = sizes
    patches_per_value = len(batch.group.pixel_values) // max(len(at_images), 1)
    return at_images.repeat_interleave(patches_per_value), torch.stack(at_inputs).sum(0)


def compare_with_rows(trainer: Trainer, group: GroupBatch) -> Iterator[tuple[Prompt, str]]:
    """Yield (prompt, problem) if tokens or image patches do not match the data file."""
    answers: dict[int, list[list[int]]] = {}  # {id(prompt): token ids per answer}
    for part in parts_of(group):
        prompt = part.prompt
        row = part.prompt.row
        ids = group.input_ids[part.span].tolist()
        if row is None or not row.messages:
            continue  # prompts written by an environment have no messages to compare with
        if not part.is_prompt:
            # packing may drop an answer's last token, which predicts nothing
            known = answers[id(prompt)]
            if known and ids not in known and ids not in [x[:-1] for x in known]:
                yield prompt, "the tokens of an answer are not those of its row"
            continue
        given = [encode_answer(trainer.processor, row, getattr(row, x)) for x in trainer.answers]
        answers[id(prompt)] = [turn.ids.tolist() for x in given for turn in x.turns or [x]]
        # turns have their own prompts if the chat template drops earlier reasoning
        fresh = replace(row, prepared_prompt=None).prompt(trainer.processor)
        fresh_prompts = [fresh, *(turn.prompt for x in given for turn in x.turns[1:])]
        patches = [number for _, patches in part.images for number in patches]
        shown = group.pixel_values[patches].cpu()
        if patches and not shown.any():
            yield prompt, "all patches of the images are 0, which is gray"
        same = [x for x in fresh_prompts if torch.equal(x.pixel_values, shown)]
        if not same:
            yield prompt, "the images of the prompt are not those of its row"
        elif not any(x.input_ids.tolist() == ids for x in same):
            yield prompt, "the tokens of the prompt are not those of its row"
        text = trainer.processor.tokenizer.decode(fresh.input_ids.tolist())
        lacking = find_missing_text(row.messages, text, len(row.messages))
        if lacking:
            yield prompt, f"the tokens of the step do not contain {lacking}"
