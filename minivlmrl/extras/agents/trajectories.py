"""Sample trajectories: multi-turn completions where each turn has its own context window.

A context window is one turn's prompt. The first window is the row's prompt. Later windows hold messages returned by
`observe(rounds)` or, with sampling.history=K, all text so far and the images from the newest K rounds. A round is a
turn with its tool results. A turn without a tool call, or `done = True`, ends the trajectory. The loss treats all turns
as one completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat_template import IMAGE, VIDEO
from minivlmrl.data.messages import check_messages, shown_parts_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.micro_batching import sample_in_micro_batches
from minivlmrl.errors import UserError, error_context, truncate
from minivlmrl.extras.agents.environment import Environment, get_environment
from minivlmrl.extras.agents.tool_calls import Call, call_method, valid_text
from minivlmrl.extras.agents.tool_sampler import (
    ToolEpisode,
    ToolSampler,
    as_prompt,
    begin_episodes,
    encode_answers,
    find_environment,
    step_episodes,
)
from minivlmrl.generation.generate import TokenSampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.decoder import VisionLanguageModel

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)


def find_sampler(name: str, history: int | None) -> type[Sampler]:
    return TrajectorySampler if has_windows(name, history) else ToolSampler


def has_windows(name: str, history: int | None) -> bool:
    """Return whether each turn has its own prompt."""
    observes = hasattr(get_environment(name)(), "observe")
    if observes and history is not None:
        raise UserError(
            f"sampling.history is set, but the environment {name} has a method observe, which also "
            "defines the context windows; remove one of the two"
        )
    return observes or history is not None


@dataclass
class Round:
    """One turn with its tool calls and their results."""

    text: str
    parts: list[dict]  # tool results as message parts
    answers: Prompt  # tool results as token ids and patches
    images: list[PIL.Image.Image]  # images in the tool results


class Episode(ToolEpisode):
    """State of one trajectory while sampling."""

    def __init__(self, environment: Environment, prompt: Prompt, row: Row):
        super().__init__(environment)
        self.prompt = prompt
        self.row = row
        self.key = ""  # sampling seed, combined with the turn number
        self.turns: list[Completion] = []
        self.rounds: list[Round] = []

    @property
    def has_next_turn(self) -> bool:
        """Return whether the last turn called a tool, and the environment is not done."""
        return len(self.rounds) == len(self.turns)

    def answer(self, calls: list[Call], turn_ended: bool, tokens_left: int, processor: Processor) -> bool:
        """Run tool calls and record the round; return True, because a tool call always ends the turn."""
        answers, pictures = self.call_tools(calls, processor)
        if not self.done:
            ids = encode_answers(answers, pictures, turn_ended, processor)
            read, _ = as_prompt(ids, pictures, processor)
            text = processor.decode_assistant_turn(Completion(torch.tensor(self.ids)))
            images = [image for image, _ in pictures]
            self.rounds.append(Round(text, list(chain(*answers)), read, images))
        return True

    def finish(self, completion: Completion):
        """Store a sampled turn, and reset the state for the next one."""
        self.turns.append(completion)
        self.ids = []
        self.policy_mask = []
        self.text = b""
        self.ended = False

    def trajectory(self) -> Completion:
        """Concatenate all turns into one Completion."""
        windows = [turn.prompt for turn in self.turns[1:]]
        # logs show the last image in each prompt after the first
        shown = [window.row.images[-1:] for window in windows if window and window.row]
        return Completion(
            ids=torch.cat([turn.ids for turn in self.turns]),
            logps=torch.cat([turn.sampled_logps for turn in self.turns]),
            stopped=self.turns[-1].stopped,
            tool_use=self.tool_use,
            turns=self.turns,
            pictures=[(image,) for images in shown for image in images],
        )


class TrajectorySampler(Sampler):
    """Sampler for multi-turn trajectories.

    Sharded weights are gathered before the first turn, because gathering needs all ranks, and some may have no later
    turns.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.make_environment = find_environment(self)
        self.episodes: list[Episode] = []  # one episode per row in the batch

    def token_sampler(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> TokenSampler:
        self.episodes = begin_episodes(Episode, self.make_environment, self, prompts, num_generations)
        for i, episode in enumerate(self.episodes):
            episode.key = f"{keys[i // num_generations]}/{i % num_generations}"
        return super().token_sampler(prompts, num_generations, keys)

    def generate(
        self, model: VisionLanguageModel, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        episodes = self.episodes
        self.sample_turns(model, prompts, num_generations, sample_token)
        while unfinished := [episode for episode in episodes if episode.has_next_turn]:
            windows = [self.window(episode) for episode in unfinished]
            next_turns = partial(self.sample_next_turns, model)
            sample_in_micro_batches(next_turns, windows, 1, unfinished, self.sampling, None)
        starts = range(0, len(episodes), num_generations)
        groups = [episodes[i : i + num_generations] for i in starts]
        return [[episode.trajectory() for episode in group] for group in groups]

    def sample_next_turns(
        self, model: VisionLanguageModel, windows: list[Prompt], num_generations: int, episodes: list[Episode]
    ) -> list[list[Completion]]:
        self.episodes = episodes
        keys = [f"{episode.key}/{len(episode.turns)}" for episode in episodes]
        sample_token = super().token_sampler(windows, num_generations, keys)
        groups = self.sample_turns(model, windows, num_generations, sample_token)
        for window, [turn] in zip(windows, groups, strict=True):
            turn.prompt = window
        return groups

    def sample_turns(
        self, model: VisionLanguageModel, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        """Sample one turn for each unfinished trajectory."""
        groups = super().generate(model, prompts, num_generations, sample_token)
        for episode, turn in zip(self.episodes, chain(*groups), strict=True):
            episode.finish(turn)
        return groups

    def accept_tokens(self, rows: Tensor, ids: Tensor, turn_ends: Tensor) -> Tensor:
        text_ends = self.record_tokens(rows, ids)
        return step_episodes(self.episodes, self, rows, ids, turn_ends, text_ends)

    def window(self, episode: Episode) -> Prompt:
        row = episode.row
        name = f"{row.where or f'row {row.index}'}: turn {len(episode.turns)}"
        with error_context(name):
            if self.sampling.history is None:
                window = observed_window(episode, self.processor)
            else:
                window = history_window(episode, self.sampling.history, self.processor)
            max_positions = self.model.config.max_position_embeddings
            limit = max_positions - self.sampling.max_new_tokens
            num_tokens = len(window.input_ids)
            if num_tokens > limit:
                raise UserError(
                    f"the context window has {num_tokens} tokens, which together with sampling.max_new_tokens exceeds "
                    f"the model's max_position_embeddings ({max_positions}); show fewer or smaller images, or decrease "
                    f"{type(episode.environment).__name__}.max_tool_calls"
                )
        return window


def observed_window(episode: Episode, processor: Processor) -> Prompt:
    """Build the next prompt from the messages returned by `observe`."""
    rounds = [(past.text, past.parts) for past in episode.rounds]
    messages = call_method(episode.environment, "observe", rounds)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"observe must return a list of messages, but returned {truncate(messages, 40)}")
    check_messages(messages)
    messages = valid_text(messages)  # generated text may have lone surrogates
    images = []
    for part in shown_parts_of(messages):
        image = part.get("image")
        if not isinstance(image, PIL.Image.Image):
            raise UserError(
                f"observe returned an image part with {truncate(image, 40)} instead of a PIL image; write "
                'the part as {"type": "image", "image": a PIL image}'
            )
        images.append(image)
    return Row(messages, images).prompt(processor)


def history_window(episode: Episode, history: int, processor: Processor) -> Prompt:
    """Build the next prompt from all text so far and the images in the newest rounds."""
    shown = [episode.prompt, *(past.answers for past in episode.rounds)]
    written = [*(turn.ids for turn in episode.turns), torch.empty(0, dtype=torch.long)]
    tokens = processor.tokenizer.special_tokens
    vision_ids = torch.tensor([tokens[name] for name in VISION_TOKENS])
    ids = []
    for number, (prompt, turn_ids) in enumerate(zip(shown, written, strict=True)):
        is_new = number >= len(shown) - history
        ids.append(prompt.input_ids if is_new else without_ids(prompt.input_ids, vision_ids))
        # drop sampled vision tokens, which have no image
        ids.append(without_ids(turn_ids, vision_ids))
    newest = shown[-history:]
    seconds = [x.second_per_grid_ts for x in newest if x.second_per_grid_ts is not None]
    window = Prompt(
        input_ids=torch.cat(ids),
        pixel_values=torch.cat([prompt.pixel_values for prompt in newest]),
        image_grid_thw=torch.cat([prompt.image_grid_thw for prompt in newest]),
        second_per_grid_ts=torch.cat(seconds),
    )
    images = [episode.row.images, *(past.images for past in episode.rounds)]
    window.row = Row([], list(chain(*images[-history:])))
    return window


def without_ids(ids: Tensor, excluded: Tensor) -> Tensor:
    return ids[~torch.isin(ids, excluded)]
