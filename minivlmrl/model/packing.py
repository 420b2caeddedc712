"""The one batch type: a packed run of prompts, each with its completions after it, and images.

SFT is a prompt with one completion, GRPO a prompt with G of them, a prefill a prompt with none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.linear_log_softmax import join_masks
from minivlmrl.model.attention import GroupLayout
from minivlmrl.model.rope import get_rope_index

if TYPE_CHECKING:
    from minivlmrl.model.config import ModelConfig


@dataclass
class GroupBatch:
    """N tokens in one run, without padding: R completions of M tokens in all.

    Of a trajectory all turns are one completion, a row of what losses see.
    """

    input_ids: Tensor  # (N,) int64, without the last token of each completion: nothing follows it
    position_ids: Tensor  # (3, N) int64: time, height, width
    pixel_values: Tensor  # (patches, patch_dim) float32, images and videos in order
    image_grid_thw: Tensor  # (images and videos, 3) int64
    vision_index: Tensor  # (merged tokens,) where images and videos are in the run
    completion_ids: Tensor  # (M,) int64, the tokens that are scored, completions in order
    # (M,) float32: 1 if the policy wrote it, 0 if a tool or another turn inserted it
    policy_mask: Tensor
    sampling_mask: Tensor  # (2, K) int64: a token, an id that filters kept; (2, 0): no filters
    layout: GroupLayout
    prompts: Sequence[Prompt] = ()  # the B packed prompts
    vision_embeds: Tensor | None = None  # of all of them, if all prompts have theirs

    def pad(self, per_token: Tensor) -> Tensor:
        """(M,) -> (R, T), T tokens of the longest completion, zeros on the right: for losses."""
        R = len(self.layout.row_lengths)
        T = max(self.layout.row_lengths, default=0)
        padded = per_token.new_zeros(R * T)
        return padded.index_copy(0, self.layout.row_index, per_token).view(R, T)

    @property
    def completion_mask(self) -> Tensor:
        """(R, T): 1 where a row has a token that was written, whatever its id is."""
        return self.pad(self.policy_mask)


def pack(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], config: "ModelConfig",
    device: torch.device | str = "cpu", rows: Sequence[int] | None = None,
) -> GroupBatch:  # fmt: skip
    """Lay prompts and their completions end to end.

    Example: a prompt of 3 tokens with completions a of 3 and b of 2 tokens gives N = 6 and M = 5,
        run       p0 p1 p2 | a0 a1 | b0
        position   0  1  2 |  3  4 |  3      each completion continues where its prompt ended
        predicts        a0   a1 a2   b1      p2 predicts b0 as well

    Args:
        completions: for each prompt its Completions, maybe none.
        config: the ModelConfig.
        rows: of each completion the row that it is a part of, see GroupLayout.
    """
    all_completions = list(chain(*completions))
    if not all(len(completion.ids) for completion in all_completions):
        raise ValueError("a completion has no tokens; drop its row or end it with a stop token")
    prompt_lengths = [len(prompt.input_ids) for prompt in prompts]
    completion_lengths = [[len(completion.ids) for completion in group] for group in completions]
    spans = []  # in the order of the run
    for prompt, group in zip(prompts, completions, strict=True):
        spans += lay_group(prompt, group, config)
    placeholders = torch.tensor([config.image_token_id, config.video_token_id])
    looked_through = torch.cat([span.image_ids for span in spans])  # (N,)
    vision_index = torch.isin(looked_through, placeholders).nonzero()[:, 0]
    nothing = torch.zeros(0, dtype=torch.long)  # for a batch without completions
    scored = torch.cat([nothing, *(completion.ids for completion in all_completions)])
    policy_mask = torch.cat(
        [nothing, *(completion.policy_mask for completion in all_completions)]
    ).float()
    masks = [x.sampling_mask for x in all_completions if x.sampling_mask]
    pixel_values = torch.cat([patches for span in spans for patches in span.pixel_values])
    return GroupBatch(
        input_ids=to_device(torch.cat([span.ids for span in spans]), device),
        position_ids=to_device(torch.cat([span.position_ids for span in spans], dim=1), device),
        pixel_values=to_device(pixel_values, device),
        image_grid_thw=torch.cat([grids for span in spans for grids in span.grids]),
        vision_index=to_device(vision_index, device),
        completion_ids=to_device(scored, device),
        policy_mask=to_device(policy_mask, device),
        sampling_mask=to_device(join_masks(scored, masks), device),
        layout=GroupLayout(prompt_lengths, completion_lengths, device, rows),
        prompts=prompts,
        vision_embeds=join_vision_embeds(prompts, all_completions),
    )


@dataclass
class Span:
    """A prompt or a completion in the run: n tokens."""

    ids: Tensor  # (n,)
    # (n,): ids, but -1 where a completion wrote an image token, which is text and shows no image
    image_ids: Tensor
    position_ids: Tensor  # (3, n)
    pixel_values: Sequence[Tensor] = ()  # of its images and videos: each (patches, patch_dim)
    grids: Sequence[Tensor] = ()  # each (images and videos, 3)


def lay_group(prompt: Prompt, group: Sequence[Completion], config: "ModelConfig") -> list[Span]:
    """Lay out a prompt and each of its completions, which go on from the prompt's last position."""
    ids = prompt.input_ids
    grids = prompt.image_grid_thw
    position_ids = get_rope_index(ids, grids, config, prompt.second_per_grid_ts)  # (3, P)
    spans = [Span(ids, ids, position_ids, [prompt.pixel_values], [grids])]
    next_position = int(position_ids.max()) + 1
    for completion in group:
        span = Span(
            ids=completion.ids[:-1],
            # a written <|image_pad|> is text
            image_ids=completion.ids.masked_fill(completion.policy_mask, -1)[:-1],
            position_ids=next_position + torch.arange(len(completion.ids) - 1).expand(3, -1),
        )
        if completion.pictures:
            span.pixel_values = [patches for _, patches, _ in completion.pictures]
            grids = torch.tensor([grid for *_, grid in completion.pictures])
            span.grids = [grids]
            span.position_ids = next_position + get_rope_index(span.image_ids, grids, config)
        spans.append(span)
    return spans


def join_vision_embeds(
    prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> Tensor | None:
    """Join what a frozen tower made of all images of a batch; None: it has not run for some."""
    embeds = [x for prompt in prompts if (x := prompt.vision_embeds) is not None]
    if len(embeds) < len(prompts) or any(completion.pictures for completion in completions):
        return None
    return torch.cat(embeds)
