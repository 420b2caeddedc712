"""Trajectories: every turn is written from a window of its own, and what is not in it is forgotten.

The window of the first turn is the row's prompt. Later ones are what the environment's
`observe(rounds)` says, or with sampling.history=K all text and the pictures of the newest K rounds.
A round is a turn and the answers to its calls. A trajectory ends with a turn that calls nothing, or
when the environment is `done`. It is one Completion and one row of a loss; docs/agents.md.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.agents.environment import get_environment
from minivlmrl.agents.tool_calls import ask
from minivlmrl.agents.tool_sampler import Play, ToolSampler, as_prompt, encode_answers
from minivlmrl.config.options import SamplingOptions
from minivlmrl.config.parsing import naming
from minivlmrl.data.chat_template import IMAGE, VIDEO
from minivlmrl.data.rows import Completion, Processor, Prompt, Row
from minivlmrl.data.tokenize_completions import check_messages, shown_parts_of
from minivlmrl.distributed.micro_batching import in_pieces
from minivlmrl.generation.generate import TokenSampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.packing import GroupBatch, pack

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)


def find_sampler(sampling: SamplingOptions) -> type[ToolSampler]:
    """Return the class of the sampler that calls the tools of sampling.environment."""
    return TrajectorySampler if has_windows(sampling) else ToolSampler


def has_windows(sampling: SamplingOptions) -> bool:
    """Return whether completions are trajectories (ValueError: there are two rules for windows)."""
    observes = hasattr(get_environment(sampling.environment)(), "observe")
    if observes and sampling.history is not None:
        raise ValueError(
            f"sampling.history: {sampling.environment} has observe, which says what is seen; "
            "leave one of them out"
        )
    return observes or sampling.history is not None


def pack_turns(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], config, device="cpu"
) -> GroupBatch:
    """Pack completions, of trajectories all turns: each is scored given its own window.

    The first turns of a group share their prompt. Rows of the batch are trajectories.
    """
    laid_prompts = []
    laid_completions = []
    rows = []
    for prompt, group in zip(prompts, completions, strict=True):
        first_row = max(rows, default=-1) + 1
        laid_prompts.append(prompt)
        laid_completions.append([c.turns[0] if c.turns else c for c in group])
        rows += range(first_row, first_row + len(group))
        for row, completion in enumerate(group, first_row):
            for turn in completion.turns[1:]:
                laid_prompts.append(turn.prompt)
                laid_completions.append([turn])
                rows.append(row)
    return pack(laid_prompts, laid_completions, config, device, rows)


class TrajectoryPlay(Play):
    """One trajectory while it is written."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turns = []
        self.rounds = []  # of each what was written, the parts that answered, and as a Prompt

    @property
    def goes_on(self) -> bool:
        """Say whether another turn follows: the last one was answered, and it is not done."""
        return len(self.rounds) == len(self.turns)

    def answer(self, calls: list, turn_ended: bool, tokens_left: int, processor) -> bool:
        """Answer calls; the turn ends, as the answers are for the next window."""
        answers, pictures = self.call_tools(calls, processor)
        if not self.done:
            ids = encode_answers(answers, pictures, turn_ended, processor)
            answer, _ = as_prompt(ids, pictures, processor)
            answer.row = Row([], [image for image, _ in pictures])
            text = processor.turn(Completion(torch.tensor(self.ids)))
            self.rounds.append((text, list(chain(*answers)), answer))
        return True

    def finish(self, completion: Completion):
        """Keep a turn, and begin the next one."""
        self.turns.append(completion)
        self.ids = []
        self.written = []
        self.text = b""
        self.ended = False

    def trajectory(self) -> Completion:
        """Join all turns; its pictures, to be seen by people, are the newest of each window."""
        shown = [turn.prompt.row.images[-1:] for turn in self.turns[1:]]
        return Completion(
            ids=torch.cat([turn.ids for turn in self.turns]),
            logps=torch.cat([turn.logps for turn in self.turns]),
            stopped=self.turns[-1].stopped,
            environment=self.environment,
            calls=(self.num_calls, self.num_failed, False),
            turns=self.turns,
            pictures=[(image,) for images in shown for image in images],
        )


class TrajectorySampler(ToolSampler):
    """Draws trajectories. A turn is drawn by the key of its row, completion and number.

    Ranks may have other numbers of turns: weights are gathered once for all of them.
    """

    play_type = TrajectoryPlay

    def token_sampler(self, prompts, num_generations, keys) -> TokenSampler:
        self.keys = [f"{key}/{number}" for key in keys for number in range(num_generations)]
        return super().token_sampler(prompts, num_generations, keys)

    def generate(self, model, prompts, num_generations, choose) -> list[list[Completion]]:
        super().generate(model, prompts, num_generations, choose)
        plays = self.plays
        keyed_plays = list(zip(self.keys, plays, strict=True))
        while going_on := [(key, play) for key, play in keyed_plays if play.goes_on]:
            windows = [self.window(play) for _, play in going_on]
            in_pieces(partial(self.draw_turns, model), windows, 1, going_on, self.sampling, None)
        starts = range(0, len(plays), num_generations)
        return [[play.trajectory() for play in plays[i : i + num_generations]] for i in starts]

    def draw_turns(self, model, windows, num_generations, keyed_plays) -> list[list[Completion]]:
        """Draw the next turn of some trajectories."""
        self.plays = [play for _, play in keyed_plays]
        keys = [f"{key}/{len(play.turns)}" for key, play in keyed_plays]
        choose = Sampler.token_sampler(self, windows, num_generations, keys)
        groups = super().generate(model, windows, num_generations, choose)
        for window, [turn] in zip(windows, groups, strict=True):
            turn.prompt = window
        return groups

    def window(self, play: TrajectoryPlay) -> Prompt:
        """Make the next window of a trajectory (ValueError: it cannot be shown, names the row)."""
        row = play.prompt.row
        name = f"{row.where or f'row {row.index}'}: turn {len(play.turns)}"
        with naming(name):
            if self.sampling.history is None:
                window = observed(play, self.processor)
            else:
                window = remembered(play, self.sampling.history, self.processor)
            max_positions = self.model.config.max_position_embeddings
            limit = max_positions - self.sampling.max_new_tokens
            num_tokens = len(window.input_ids)
            if num_tokens > limit:
                raise ValueError(
                    f"its window has {num_tokens} tokens; with sampling.max_new_tokens that is "
                    f"over the model's {max_positions} (max_position_embeddings): show fewer or "
                    f"smaller pictures, or lower {type(play.environment).__name__}.max_tool_calls"
                )
        return window


def observed(play: TrajectoryPlay, processor: Processor) -> Prompt:
    """Make a window of the messages that the environment's observe(rounds) returns.

    rounds: of each the policy's text, and the parts of what its calls were answered.
    """
    rounds = [(text, parts) for text, parts, _ in play.rounds]
    messages = ask(play.environment, "observe", rounds)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"observe returned {messages!r:.40}; it must be a list of messages")
    check_messages(messages)
    images = [part.get("image") for part in shown_parts_of(messages)]
    for image in images:
        if not isinstance(image, PIL.Image.Image):
            raise ValueError(
                f"observe shows {image!r:.40}; a part names its picture: "
                '{"type": "image", "image": a PIL image}'
            )
    return Row(messages, images).prompt(processor)


def remembered(play: TrajectoryPlay, history: int, processor: Processor) -> Prompt:
    """Make a window of all text so far, and the pictures of the newest rounds.

    With all rounds it is what a completion without `history` reads, token for token.
    """
    shown = [play.prompt, *(answer for *_, answer in play.rounds)]
    written = [*(turn.ids for turn in play.turns), torch.empty(0, dtype=torch.long)]
    tokens = processor.tokenizer.special_tokens
    vision_ids = torch.tensor([tokens[name] for name in VISION_TOKENS])
    ids = []
    for prompt, turn_ids in zip(shown, written, strict=True):
        is_new = len(ids) // 2 >= len(shown) - history
        prompt_ids = prompt.input_ids
        ids.append(prompt_ids if is_new else without(prompt_ids, vision_ids))
        ids.append(without(turn_ids, vision_ids))  # what the policy wrote of them shows nothing
    newest = shown[-history:]
    window = Prompt(
        input_ids=torch.cat(ids),
        pixel_values=torch.cat([prompt.pixel_values for prompt in newest]),
        image_grid_thw=torch.cat([prompt.image_grid_thw for prompt in newest]),
        second_per_grid_ts=torch.cat([prompt.second_per_grid_ts for prompt in newest]),
    )
    window.row = Row([], list(chain(*(prompt.row.images for prompt in newest))))
    return window


def without(ids: Tensor, left_out: Tensor) -> Tensor:
    """Leave out some ids."""
    return ids[~torch.isin(ids, left_out)]
