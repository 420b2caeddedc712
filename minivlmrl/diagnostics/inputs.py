"""Check at a stage's first step that every image and every text in its rows reaches the loss."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unicodedata import normalize

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.messages import as_turns
from minivlmrl.data.processor import encode_answer, join_tool_results
from minivlmrl.data.rendered_texts import find_missing_text
from minivlmrl.data.rows import Prompt, Row
from minivlmrl.errors import phase
from minivlmrl.kernels.backend import to_device
from minivlmrl.model.decoder import TextModel, VisionLanguageModel
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.value_head import ValueHead
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import MicroBatch, Step, Trainer

# largest relative difference between cached image embeddings and those that the tower computes now
CACHE_TOLERANCE = 0.05
# The row counts in a micro-batch are limited, so that the check takes less than 1 % of the time
# of 100 steps also for a tiny model.
NUM_GRAY = 2  # prompts that are compared with gray images
NUM_ROWS = 16  # prompts that are encoded again, half of them the longest, half the shortest
ADVICE = (
    "The run continues, but it does not learn from all inputs. Check the trainer, the collator and "
    "the model, if they are yours, and otherwise report this warning."
)


class InputCheck(Callback):
    """Warns if an image or a text in a stage's first optimizer step does not reach the loss.

    The check costs less than one optimizer step, and changes neither weights nor random numbers.
    """

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.log = log

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        self.first_step = state.step

    def on_step_begin(
        self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches
    ):
        if number != self.first_step:
            return
        check = partial(check_inputs, trainer, step)
        with phase("forward"):
            found = trainer.world.run_on_all_ranks(check)
        warnings = trainer.world.gather_objects(found)
        if trainer.world.is_main:
            for warning in dict.fromkeys(sentence for part in warnings for sentence in part):
                self.log.warn(trainer.stage, number, warning, number)


def check_inputs(trainer: Trainer, step: Step) -> list[str]:
    """Return a warning for each kind of input in an optimizer step that does not reach the loss.

    The loss must have a gradient at the text and at each image in every row that is trained on.
    The first prompts' hidden states must change if their images are gray. The tokens of the
    longest and shortest prompts and their answers must contain their rows' texts, and must be
    the tokenizer's tokens. Their patches must be those of the images. Under FSDP, the model is not
    run.
    """
    found: dict[str, list[str]] = {}  # {problem: its rows}
    for number, batch in enumerate(step.micro_batches):
        problems = list(check_contents(trainer, batch))
        if not trainer.run.uses_fsdp:
            problems += check_loss(trainer, batch)
            if number == 0:
                problems += check_gray(trainer, batch.group)
        for where, problem in problems:
            found.setdefault(problem, []).append(where)
    warnings = []
    for problem, places in found.items():
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        warnings.append(f"{places[0]}{more}: {problem}. {ADVICE}")
    return warnings


def place(prompt: Prompt) -> str:
    """Return the file and line of a prompt's row, for warnings."""
    return (prompt.row.where or f"row {prompt.row.index}") if prompt.row else "a prompt"


def check_contents(trainer: Trainer, batch: MicroBatch) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for each row whose texts, tokens or patches are not in a micro-batch.

    Only the longest and the shortest prompts are checked, because a token limit cuts long
    prompts, and prompts without their images are short.
    """
    group = batch.group
    segments = segments_of(group)
    images = list(images_of(trainer, batch, segments))
    by_length = sorted(range(len(group.prompts)), key=lambda i: len(group.layout.prompt_spans[i]))
    half = NUM_ROWS // 2
    numbers = {*by_length[:half], *by_length[-half:]}
    windows: dict[int, list[Window]] = {}  # {id of a row: its windows that were not found yet}
    for number, prompt in enumerate(group.prompts):
        if number not in numbers or prompt.row is None or not prompt.row.messages:
            continue  # a trajectory's turn, whose prompt an environment has written
        own_segment = next(part for part in segments if part.prompt == number)
        own_images = [image for image in images if image.segment is own_segment]
        no_patches = group.pixel_values[:0]
        shown = replace(
            prompt,
            input_ids=group.input_ids[slice_of(own_segment.positions)].cpu(),
            pixel_values=torch.cat(
                [no_patches, *(group.pixel_values[x.patches] for x in own_images)]
            ),
            image_grid_thw=group.image_grid_thw[[image.number for image in own_images]],
        )
        answers = []
        for part in segments:
            if part.prompt == number and not part.is_prompt:
                answers.append(group.completion_ids[part.tokens])
        if id(prompt.row) not in windows:
            windows[id(prompt.row)] = windows_of(trainer, prompt.row)
        window = take_window(windows[id(prompt.row)], prompt)
        for problem in check_prompt(trainer, window, shown, answers):
            yield place(prompt), problem


@dataclass(eq=False)
class Window:
    """A prompt that a row defines, with the answers that follow this prompt."""

    messages: list[dict]  # the prompt's messages
    answers: list[list[dict]]  # each given answer's turns
    prompt: Prompt


def windows_of(trainer: Trainer, row: Row) -> list[Window]:
    """Return a row's prompt, and the prompts of later turns that need prompts of their own.

    Only if the chat template rewrites earlier turns, later turns have prompts of their own, see
    data.processor.encode_completion.
    """
    first = Window(row.messages, [], row.prompt(trainer.processor))
    windows = [first]
    for name in trainer.answers:
        answer = getattr(row, name)
        turns = join_tool_results(as_turns(answer), trainer.processor.tools)
        completion = encode_answer(trainer.processor, row, answer)
        starts = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        first.answers.append(turns[:1] if completion.turns else turns)
        for start, turn in zip(starts[1:], completion.turns[1:], strict=False):
            assert turn.prompt is not None
            messages = [*row.messages, *turns[:start]]
            windows.append(Window(messages, [[turns[start]]], turn.prompt))
    return windows


def take_window(windows: list[Window], prompt: Prompt) -> Window:
    """Remove and return the window with a prompt's token ids, or the first window.

    The last window stays in the list, because a reward model scores each answer after a copy.
    """
    equal = [x for x in windows if torch.equal(x.prompt.input_ids, prompt.input_ids)]
    window = equal[0] if equal else windows[0]
    if len(windows) > 1:
        windows.remove(window)
    return window


def check_prompt(
    trainer: Trainer, window: Window, prompt: Prompt, answers: list[Tensor]
) -> Iterator[str]:
    """Yield problems in a prompt and its answers, as a micro-batch contains them.

    Args:
        window: the prompt and the answers as the row defines them.
        prompt: ids, patches and grids in the micro-batch.
        answers: each completion's token ids.
    """
    decode = trainer.processor.tokenizer.decode
    prompt_text = decode(prompt.input_ids.tolist())
    num_messages = len(window.messages)
    texts = [(window.messages, prompt_text)]
    if len(window.answers) == len(answers):
        for turns, ids in zip(window.answers, answers, strict=True):
            texts.append(([*window.messages, *turns], prompt_text + decode(ids.tolist())))
    for messages, text in texts:
        lacking = find_missing_text(_composed(messages), normalize("NFC", text), num_messages)
        if lacking:
            yield f"the tokens of the step do not contain {lacking}"
            break
    fresh = window.prompt
    num_images, num_expected = len(prompt.image_grid_thw), len(fresh.image_grid_thw)
    if num_images != num_expected:
        yield f"the step has {num_images} images of the prompt, but the row has {num_expected}"
    elif not torch.equal(prompt.pixel_values.cpu(), fresh.pixel_values):
        yield "the patches of the images differ from those of the row's images"
    elif not torch.equal(prompt.input_ids, fresh.input_ids):
        yield "the token ids of the prompt are not those of the row's prompt"
    if not _is_canonical(trainer, prompt.input_ids.tolist()):
        yield "the text of the prompt is not divided into tokens as the tokenizer divides it"


def slice_of(positions: range) -> slice:
    """Convert a position range to a slice."""
    return slice(positions.start, positions.stop)


def _composed(messages: list[dict]) -> list[dict]:
    """Convert all texts to the Unicode form NFC, as the tokenizer does."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        return normalize("NFC", value) if isinstance(value, str) else value

    return [convert(message) for message in messages]


def _is_canonical(trainer: Trainer, ids: list[int]) -> bool:
    """Return True if decoding and encoding the text between control tokens gives the same ids."""
    tokenizer = trainer.processor.tokenizer
    special_ids = {*tokenizer.special_tokens.values()}
    text_ids = []
    for token_id in [*ids, next(iter(special_ids))]:
        if token_id not in special_ids:
            text_ids.append(token_id)
        elif text_ids:
            if tokenizer.encode(tokenizer.decode(text_ids)) != text_ids:
                return False
            text_ids = []
    return True


@dataclass
class Segment:
    """A prompt, or a completion after its prompt, in a packed sequence with N positions."""

    prompt: int  # prompt index in the micro-batch
    positions: range  # segment positions in the sequence
    text: Tensor  # positions that are not image tokens
    tokens: slice  # indices of the completion tokens that see the segment
    is_prompt: bool


@dataclass
class ShownImage:
    """An image, or a video, in a packed sequence."""

    number: int  # image index in the micro-batch
    segment: Segment
    patches: slice  # its rows in pixel_values
    tokens: slice  # its rows in the embeddings that the vision tower computes
    is_seen: bool  # True if a trained token comes after the image


@dataclass
class Slopes:
    """Absolute loss gradients, summed over features."""

    shown: Tensor  # (patches,) at each patch, or at each cached embedding
    inputs: Tensor  # (N,) at each embedding that the decoder gets


def segments_of(group: GroupBatch) -> list[Segment]:
    """Return a packed sequence's prompts and completions in position order."""
    segments = []
    layout = group.layout
    is_image = torch.zeros(layout.num_tokens, dtype=torch.bool)
    is_image[group.vision_index.cpu()] = True

    def add(prompt: int, span: range, tokens: slice, is_prompt: bool):
        text = torch.arange(span.start, span.stop)[~is_image[span.start : span.stop]]
        segments.append(Segment(prompt, span, text, tokens, is_prompt))

    first = 0  # index of the segment's first completion token
    for number, spans in enumerate(layout.completion_spans):
        end = first + sum(len(span) + 1 for span in spans)
        add(number, layout.prompt_spans[number], slice(first, end), is_prompt=True)
        for span in spans:
            add(number, span, slice(first, first + len(span) + 1), is_prompt=False)
            first += len(span) + 1
    return segments


def images_of(trainer: Trainer, batch: MicroBatch, segments: list[Segment]) -> Iterator[ShownImage]:
    """Yield a micro-batch's images in order."""
    group = batch.group
    merged = trainer.policy.config.vision_config.spatial_merge_size**2
    is_trained = (batch.loss_mask.flatten()[group.layout.row_index] > 0).cpu()  # (M,)
    predict_index = group.layout.predict_index.cpu()
    first_token = 0
    for number, num_patches in enumerate(group.image_grid_thw.prod(1).tolist()):
        tokens = slice(first_token, first_token + num_patches // merged)
        position = int(group.vision_index[first_token])
        segment = next(part for part in segments if position in part.positions)
        is_later = predict_index[segment.tokens] >= position
        is_seen = bool((is_trained[segment.tokens] & is_later).any())
        patches = slice(tokens.start * merged, tokens.stop * merged)
        yield ShownImage(number, segment, patches, tokens, is_seen)
        first_token = tokens.stop


def check_loss(trainer: Trainer, batch: MicroBatch) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for each text and image in a micro-batch that the loss ignores.

    A row without any gradient is reported only if it has a given answer, because completions with
    an advantage of 0 have none.
    """
    group = batch.group
    places = [place(prompt) for prompt in group.prompts]
    slopes = run_loss(trainer, batch)
    segments = segments_of(group)
    images = [image for image in images_of(trainer, batch, segments) if image.is_seen]
    for segment in segments:
        at_text = slopes.inputs[segment.text]
        if segment.is_prompt and (trainer.answers or at_text.any()):
            for problem in _ignored(at_text, "the text of the prompt"):
                yield places[segment.prompt], problem
    for image in images:
        if slopes.inputs[image.segment.text].any():
            rows = image.patches if group.vision_embeds is None else image.tokens
            for problem in _ignored(slopes.shown[rows], "an image"):
                yield places[image.segment.prompt], problem
    if group.vision_embeds is not None and images and not _is_current(trainer, group):
        yield places[0], "the cached embeddings of the images are those of other images"


def check_gray(trainer: Trainer, group: GroupBatch) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for each prompt with images whose last hidden state ignores them.

    Only the first prompts with images are checked.
    """
    prompts = [prompt for prompt in group.prompts if len(prompt.image_grid_thw)][:NUM_GRAY]
    if not prompts:
        return
    config = trainer.policy.config
    shown = pack(prompts, [[]] * len(prompts), config, group.input_ids.device)
    name, images = images_field(shown)
    gray = replace(shown, **{name: torch.zeros_like(images)})
    last = torch.tensor([span.stop - 1 for span in shown.layout.prompt_spans])
    last = to_device(last, group.input_ids.device)
    for model in trainer.trained.modules():
        if isinstance(model, VisionLanguageModel):
            with torch.no_grad():
                states, gray_states = model(shown, select=last), model(gray, select=last)
            for prompt, is_equal in zip(prompts, (states == gray_states).all(1), strict=True):
                if is_equal:
                    yield place(prompt), "the hidden states do not change if the images are gray"


def images_field(group: GroupBatch) -> tuple[str, Tensor]:
    """Return the name and value of the field with patches, or with cached embeddings."""
    name = "pixel_values" if group.vision_embeds is None else "vision_embeds"
    return name, getattr(group, name)


def _ignored(slopes: Tensor, name: str) -> Iterator[str]:
    """Yield a problem if the gradients at a text or an image are zero, or most of them are."""
    num_zeros = int((slopes == 0).sum())
    if len(slopes) and num_zeros == len(slopes):
        yield f"the loss has no gradient at {name}"
    elif num_zeros * 2 > len(slopes):
        yield f"the loss has no gradient at most of {name}"


def _is_current(trainer: Trainer, group: GroupBatch) -> bool:
    """Return True if the cached image embeddings are those that the vision tower computes."""
    with torch.no_grad():
        fresh = trainer.policy.visual(group.pixel_values, group.image_grid_thw)
    difference = (fresh - group.vision_embeds).norm()
    return bool(difference <= CACHE_TOLERANCE * fresh.norm())


def run_loss(trainer: Trainer, batch: MicroBatch) -> Slopes:
    """Compute the loss's gradients at the patches or cached embeddings, and at all tokens."""
    name, shown = images_field(batch.group)
    leaf = shown.detach().clone().requires_grad_()
    inputs: list[Tensor] = []

    def keep_input(module: nn.Module, arguments: tuple) -> tuple:
        x = arguments[0]
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        inputs.append(x)
        return (x, *arguments[1:])

    def add_states(module: ValueHead, arguments: tuple, values: Tensor) -> Tensor | None:
        # a new head is zero, and would hide all inputs
        return None if module.weight.any() else values + arguments[0].mean(-1, keepdim=True)

    with ExitStack() as stack:
        for module in dict.fromkeys([*trainer.trained.modules(), *trainer.policy.modules()]):
            for weight in module.parameters(recurse=False):
                # no weight gradient is needed, which saves a third of the time
                stack.callback(weight.requires_grad_, weight.requires_grad)
                weight.requires_grad_(False)
            hooks = []
            if isinstance(module, TextModel):
                hooks.append(module.register_forward_pre_hook(keep_input))
            elif isinstance(module, ValueHead):
                hooks.append(module.register_forward_hook(add_states))
            for hook in hooks:
                stack.callback(hook.remove)
        group = replace(batch.group, **{name: leaf})
        loss, _ = trainer.training_loss(replace(batch, group=group))
        slopes: Sequence[Tensor | None] = [None] * (1 + len(inputs))
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, [leaf, *inputs], allow_unused=True)
    at_shown, *at_inputs = [
        torch.zeros(len(x)) if slope is None else slope.detach().abs().float().sum(-1).cpu()
        for x, slope in zip([leaf, *inputs], slopes, strict=True)
    ]
    return Slopes(at_shown, torch.stack(at_inputs).sum(0))
