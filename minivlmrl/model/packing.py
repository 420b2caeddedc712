"""Pack prompts, completions and images into a GroupBatch, which all losses and the sampler use.

SFT packs each prompt with one completion, GRPO packs each prompt with G completions, and a prefill packs prompts
without completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.linear_log_softmax import join_masks
from minivlmrl.model.attention import PackedLayout
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.rope import get_rope_index


@dataclass
class GroupBatch:
    """A packed sequence of N tokens without padding, with R rows and M completion tokens in total.

    One row of the batch is one completion, with all its turns.
    """

    # (N,) int64 token ids without each completion's last token, after which no token is predicted
    input_ids: Tensor
    position_ids: Tensor  # (3, N) int64 positions in time, height and width
    # (patches, patch_dim) patches of all images and videos in order, in float32 or the computation dtype
    pixel_values: Tensor
    image_grid_thw: Tensor  # (images and videos, 3) int64
    vision_index: Tensor  # (merged tokens,) image-token and video-token positions in input_ids
    completion_ids: Tensor  # (M,) int64, the tokens that are scored, completions in order
    # (M,) float32, 1 for completion tokens that the policy generated, 0 for tokens from tools or users
    policy_mask: Tensor
    # (2, K) int64 pairs (index of a completion token, token id that top_k or top_p kept); K is 0 if neither is set
    sampling_mask: Tensor
    layout: PackedLayout
    prompts: Sequence[Prompt] = ()  # the B packed prompts
    # (merged tokens, width) cached output of a frozen vision tower for all images, or None
    vision_embeds: Tensor | None = None

    def pad(self, per_token: Tensor) -> Tensor:
        """Arrange the values of completion tokens (M,) in rows (R, T), padded on the right with zeros."""
        R = len(self.layout.row_lengths)
        T = max(self.layout.row_lengths, default=0)
        padded = per_token.new_zeros(R * T)
        return padded.index_copy(0, self.layout.row_index, per_token).view(R, T)

    @property
    def completion_mask(self) -> Tensor:
        """Return a mask (R, T) that is 1 for tokens that the policy generated and 0 elsewhere."""
        return self.pad(self.policy_mask)


def pack(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    model_config: ModelConfig,
    device: torch.device | str = "cpu",
    rows: Sequence[int] | None = None,
) -> GroupBatch:
    """Concatenate prompts and their completions into one GroupBatch.

    Example: a prompt of 3 tokens, a completion a with 3 tokens and a completion b with 2 give N = 6 and M = 5,
        input_ids  p0 p1 p2 | a0 a1 | b0
        position    0  1  2 |  3  4 |  3     each completion continues where the prompt ends
        predicts         a0   a1 a2   b1     p2 also predicts b0

    Args:
        prompts: the B prompts.
        completions: each prompt's completions; a prompt may have none.
        model_config: the model's config, which determines token ids and image positions.
        device: device for all tensors in the batch except image_grid_thw.
        rows: each completion's row index; see PackedLayout.
    """
    all_completions = list(chain(*completions))
    if not all(len(completion.ids) for completion in all_completions):
        raise ValueError("A completion has no tokens. Drop its row, or end it with a stop token.")
    prompt_lengths = [len(prompt.input_ids) for prompt in prompts]
    completion_lengths = [[len(completion.ids) for completion in group] for group in completions]
    segments = []  # in input_ids order
    for prompt, group in zip(prompts, completions, strict=True):
        segments += pack_group(prompt, group, model_config)
    placeholders = torch.tensor([model_config.image_token_id, model_config.video_token_id])
    searched_ids = torch.cat([segment.image_ids for segment in segments])  # (N,)
    vision_index = torch.isin(searched_ids, placeholders).nonzero()[:, 0]
    nothing = torch.zeros(0, dtype=torch.long)  # for a batch without completions
    scored = torch.cat([nothing, *(completion.ids for completion in all_completions)])
    policy_mask = torch.cat([nothing, *(completion.policy_mask for completion in all_completions)]).float()
    masks = [x.sampling_mask for x in all_completions if x.sampling_mask]
    pixel_values = torch.cat([patches for segment in segments for patches in segment.pixel_values])
    return GroupBatch(
        input_ids=to_device(torch.cat([segment.ids for segment in segments]), device),
        position_ids=to_device(torch.cat([segment.position_ids for segment in segments], dim=1), device),
        pixel_values=to_device(pixel_values, device),
        image_grid_thw=torch.cat([grids for segment in segments for grids in segment.grids]),
        vision_index=to_device(vision_index, device),
        completion_ids=to_device(scored, device),
        policy_mask=to_device(policy_mask, device),
        sampling_mask=to_device(join_masks(scored, masks), device),
        layout=PackedLayout(prompt_lengths, completion_lengths, device, rows),
        prompts=prompts,
        vision_embeds=join_vision_embeds(prompts, all_completions),
    )


def pack_turns(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    model_config: ModelConfig,
    device: torch.device | str = "cpu",
) -> GroupBatch:
    """Pack completions with several turns; each turn has its own prompt, but a completion is one row of the batch."""
    if not any(completion.turns for group in completions for completion in group):
        return pack(prompts, completions, model_config, device)
    packed_prompts = []
    packed_completions = []
    rows = []
    for prompt, group in zip(prompts, completions, strict=True):
        first_row = max(rows, default=-1) + 1
        packed_prompts.append(prompt)
        packed_completions.append([c.turns[0] if c.turns else c for c in group])
        rows += range(first_row, first_row + len(group))
        for row, completion in enumerate(group, first_row):
            for turn in completion.turns[1:]:
                packed_prompts.append(turn.prompt)
                packed_completions.append([turn])
                rows.append(row)
    return pack(packed_prompts, packed_completions, model_config, device, rows)


@dataclass
class Segment:
    """The n tokens of one prompt or one completion in a packed sequence."""

    ids: Tensor  # (n,)
    # (n,) token ids, but -1 for sampled tokens, because no image belongs to an image placeholder that was sampled
    image_ids: Tensor
    position_ids: Tensor  # (3, n)
    pixel_values: Sequence[Tensor] = ()  # image and video patches, (patches, patch_dim)
    grids: Sequence[Tensor] = ()  # patch grids, each (images and videos, 3)


def pack_group(prompt: Prompt, group: Sequence[Completion], model_config: ModelConfig) -> list[Segment]:
    """Return the segments of a prompt and its completions; the positions of each completion begin after the prompt."""
    ids = prompt.input_ids
    grids = prompt.image_grid_thw
    position_ids = get_rope_index(ids, grids, model_config, prompt.second_per_grid_ts)  # (3, P)
    segments = [Segment(ids, ids, position_ids, [prompt.pixel_values], [grids])]
    next_position = int(position_ids.max()) + 1
    for completion in group:
        segment = Segment(
            ids=completion.ids[:-1],
            image_ids=completion.ids.masked_fill(completion.policy_mask, -1)[:-1],
            position_ids=next_position + torch.arange(len(completion.ids) - 1).expand(3, -1),
        )
        if completion.pictures:
            segment.pixel_values = [patches for _, patches, _ in completion.pictures]
            grids = torch.tensor([grid for *_, grid in completion.pictures])
            segment.grids = [grids]
            segment.position_ids = next_position + get_rope_index(segment.image_ids, grids, model_config)
        segments.append(segment)
    return segments


def join_vision_embeds(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor | None:
    embeds = [x for prompt in prompts if (x := prompt.vision_embeds) is not None]
    if len(embeds) < len(prompts) or any(completion.pictures for completion in completions):
        return None
    return torch.cat(embeds)
