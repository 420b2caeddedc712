"""Sample trajectories: multi-turn completions where every turn has its own prompt (context window).

The first prompt comes from the dataset. Later prompts consist of the messages that the environment method
`observe(rounds)` returns. With sampling.history=K, later prompts consist of all text so far and the images from the
newest K rounds. A round is a turn with its tool results. A turn without a tool call, or an environment with
`done = True`, ends the trajectory. The loss treats all turns as one completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat_template import IMAGE, VIDEO
from minivlmrl.data.messages import check_messages, shown_parts_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.micro_batching import sample_in_micro_batches
from minivlmrl.errors import UserError, error_context, require
from minivlmrl.extras.agents.environment import get_environment
from minivlmrl.extras.agents.tool_calls import Call, call_method, valid_text
from minivlmrl.extras.agents.tool_sampler import ToolEpisode, ToolSampler
from minivlmrl.generation.generate import Decode, TokenSampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.decoder import VisionLanguageModel

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)


def find_sampler(name: str, history: int | None) -> type[Sampler]:
    """Return the sampler class for an environment, which depends on whether later turns get new prompts."""
    return TrajectorySampler if has_windows(name, history) else ToolSampler


def has_windows(name: str, history: int | None) -> bool:
    """Return whether later turns get new prompts, defined by the method `observe` or by sampling.history."""
    observes = hasattr(get_environment(name)(), "observe")
    if observes and history is not None:
        raise UserError(
            f"sampling.history and the method observe of {name} both define the context windows; remove one of the two"
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
    """A multi-turn completion while it is sampled."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turns: list[Completion] = []
        self.rounds: list[Round] = []

    @property
    def has_next_turn(self) -> bool:
        """Return True if the last turn called a tool and the environment is not done."""
        return len(self.rounds) == len(self.turns)

    def answer(self, calls: list[Call], turn_ended: bool, tokens_left: int) -> bool:
        """Run tool calls, and record turn and results as a Round. Return True, because a tool call ends the turn."""
        parts, answers, pictures = self.call_tools(calls, turn_ended)
        if not self.done:
            text = self.processor.decode_assistant_turn(Completion(torch.tensor(self.ids)))
            images = [image for image, *_ in pictures]
            self.rounds.append(Round(text, [*chain(*parts)], answers, images))
        return True

    def finish(self, completion: Completion):
        """Record a sampled turn, and prepare the next one."""
        self.turns.append(completion)
        self.ids = []
        self.policy_mask = []
        self.text = b""
        self.ended = False

    def trajectory(self) -> Completion:
        """Join all turns into one completion."""
        windows = [turn.prompt for turn in self.turns[1:]]
        # log the last image in each prompt but the first
        shown = [window.row.images[-1:] for window in windows if window and window.row]
        return Completion(
            ids=torch.cat([turn.ids for turn in self.turns]),
            logps=torch.cat([turn.sampled_logps for turn in self.turns]),
            stopped=self.turns[-1].stopped,
            tool_use=self.tool_use,
            turns=self.turns,
            pictures=[(image,) for images in shown for image in images],
        )


class TrajectorySampler(ToolSampler):
    """Sample trajectories turn by turn.

    Sharded weights are gathered only before the first turn: gathering needs all ranks, and some ranks may have no
    later turns.
    """

    episode_type = Episode

    def generate(
        self, model: VisionLanguageModel, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        episodes = self.episodes
        super().generate(model, prompts, num_generations, sample_token)
        while unfinished := [episode for episode in episodes if episode.has_next_turn]:
            windows = [self.window(episode) for episode in unfinished]
            sample_in_micro_batches(partial(self.sample_next_turns, model), windows, 1, unfinished, self.sampling, None)
        trajectories = [episode.trajectory() for episode in episodes]
        return [trajectories[i : i + num_generations] for i in range(0, len(episodes), num_generations)]

    def sample_next_turns(
        self, model: VisionLanguageModel, windows: list[Prompt], num_generations: int, episodes: list[Episode]
    ) -> list[list[Completion]]:
        """Sample one turn per episode, each from its own prompt."""
        self.episodes = episodes
        keys = [f"{episode.key}/{len(episode.turns)}" for episode in episodes]
        sample_token = Sampler.token_sampler(self, windows, num_generations, keys)
        groups = super().generate(model, windows, num_generations, sample_token)
        for window, [turn] in zip(windows, groups, strict=True):
            turn.prompt = window
        return groups

    def decode(self) -> Decode:
        return Sampler.decode(self)  # prefills no tool results, because the next turn's prompt contains them

    def window(self, episode: Episode) -> Prompt:
        """Build the prompt for the next turn of an episode."""
        with error_context(f"{episode.row.name}: turn {len(episode.turns)}"):
            if self.sampling.history is None:
                window = observed_window(episode, self.processor)
            else:
                window = history_window(episode, self.sampling.history, self.processor)
            max_positions = self.model.config.max_position_embeddings
            if len(window.input_ids) + self.sampling.max_new_tokens > max_positions:
                raise UserError(
                    f"the context window has {len(window.input_ids)} tokens, which together with "
                    f"sampling.max_new_tokens exceeds the model's max_position_embeddings ({max_positions}); show "
                    "fewer or smaller images, or decrease max_tool_calls"
                )
        return window


def observed_window(episode: Episode, processor: Processor) -> Prompt:
    """Build the next prompt from the messages that the environment method `observe` returns."""
    rounds = [(past.text, past.parts) for past in episode.rounds]
    messages = call_method(episode.environment, "observe", rounds)
    require(isinstance(messages, list) and bool(messages), "the result of observe", messages, "a list of messages")
    check_messages(messages)
    messages = valid_text(messages)
    images: list[Any] = [part.get("image") for part in shown_parts_of(messages)]
    for image in images:
        require(isinstance(image, PIL.Image.Image), "an image part from observe", image, "a PIL image")
    return Row(messages, images).prompt(processor)


def history_window(episode: Episode, history: int, processor: Processor) -> Prompt:
    """Build the next prompt from all text so far and images in the newest `history` rounds."""
    shown = [episode.prompt, *(past.answers for past in episode.rounds)]
    written = [turn.ids for turn in episode.turns]
    written.append(torch.empty(0, dtype=torch.long))
    tokens = processor.tokenizer.special_tokens
    vision_ids = torch.tensor([tokens[name] for name in VISION_TOKENS])
    ids = []
    for number, (prompt, turn_ids) in enumerate(zip(shown, written, strict=True)):
        is_new = number >= len(shown) - history
        prompt_ids = prompt.input_ids
        ids.append(prompt_ids if is_new else without_ids(prompt_ids, vision_ids))
        # drop vision tokens that the model sampled: they have no image
        ids.append(without_ids(turn_ids, vision_ids))
    media = []
    for name in ("pixel_values", "image_grid_thw", "second_per_grid_ts"):
        tensors = [getattr(prompt, name) for prompt in shown[-history:]]
        media.append(torch.cat(tensors))
    window = Prompt(torch.cat(ids), *media)
    images = [episode.row.images, *(past.images for past in episode.rounds)]
    window.row = Row([], list(chain(*images[-history:])))
    return window


def without_ids(ids: Tensor, excluded: Tensor) -> Tensor:
    """Remove the excluded token ids from a sequence."""
    return ids[~torch.isin(ids, excluded)]
