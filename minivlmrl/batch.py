"""The one batch type: a packed run of prompts, each with its completions after it, and images.

SFT is a prompt with one completion, GRPO a prompt with G of them, a prefill a prompt with none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivlmrl.attention import GroupLayout
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.linear_log_softmax import join_masks
from minivlmrl.rope import get_rope_index
from minivlmrl.rows import Completion, Prompt


@dataclass
class GroupBatch:
    """N tokens in one run, without padding: R completions of M tokens in all."""

    input_ids: Tensor  # (N,) int64, without the last token of each completion: nothing follows it
    position_ids: Tensor  # (3, N) int64: time, height, width
    pixel_values: Tensor  # (patches, patch_dim) float32, images and videos in order
    image_grid_thw: Tensor  # (images and videos, 3) int64
    vision_index: Tensor  # (merged tokens,) where images and videos are in the run
    completion_ids: Tensor  # (M,) int64, the tokens that are scored, completions in order
    written: Tensor  # (M,) float32: 1 for those that the policy wrote, 0 for those that were forced
    sampling_mask: Tensor  # (2, K) int64: a token, an id that filters kept; (2, 0): no filters
    layout: GroupLayout
    prompts: Sequence[Prompt] = ()  # the B packed prompts
    vision_embeds: Tensor | None = None  # of all of them, if all prompts have theirs

    def split(self, per_token: Tensor) -> list[Tensor]:
        """Split a flat (M,) tensor over completion tokens into one piece per completion."""
        return list(per_token.split(self.layout.row_lengths))

    def pad(self, per_token: Tensor) -> Tensor:
        """(M,) -> (R, T), T tokens of the longest completion, zeros on the right: for losses."""
        rows = len(self.layout.row_lengths), max(self.layout.row_lengths, default=0)
        padded = per_token.new_zeros(rows[0] * rows[1])
        return padded.index_copy(0, self.layout.row_index, per_token).view(rows)

    @property
    def completion_mask(self) -> Tensor:
        """(R, T): 1 where a row has a token that was written, whatever its id is."""
        return self.pad(self.written)


def pack(
    prompts: Sequence[Prompt], completions: Sequence[Sequence], config, device="cpu"
) -> GroupBatch:
    """Lay prompts and their completions end to end.

    Example: a prompt of 3 tokens with completions a of 3 and b of 2 tokens gives N = 6 and M = 5,
        run       p0 p1 p2 | a0 a1 | b0
        position   0  1  2 |  3  4 |  3      each completion continues where its prompt ended
        predicts        a0   a1 a2   b1      p2 predicts b0 as well

    Args:
        completions: for each prompt its Completions, maybe none; ids (C,) alone are written whole.
        config: the ModelConfig.
    """
    groups = [[Completion(c.cpu()) if isinstance(c, Tensor) else c for c in g] for g in completions]
    lengths = [[len(c.ids) for c in group] for group in groups]
    if any(length == 0 for group in lengths for length in group):
        raise ValueError("a completion has no tokens; drop its row or end it with a stop token")
    layout = GroupLayout([len(prompt.input_ids) for prompt in prompts], lengths, device)
    placeholders = torch.tensor([config.image_token_id, config.video_token_id])
    # in the order of the run
    ids = []
    masked = []
    positions = []
    pixels = []
    grids = []
    for prompt, group in zip(prompts, groups, strict=True):
        pixels.append(prompt.pixel_values)
        grids.append(prompt.image_grid_thw)
        seconds = prompt.second_per_grid_ts
        positions.append(get_rope_index(prompt.input_ids, grids[-1], config, seconds))  # (3, P)
        next_position = int(positions[-1].max()) + 1
        ids.append(prompt.input_ids)
        masked.append(prompt.input_ids)
        for c in group:
            ids.append(c.ids[:-1])
            masked.append(c.ids.masked_fill(c.written, -1)[:-1])  # a written <|image_pad|> is text
            offsets = torch.arange(len(c.ids) - 1).expand(3, -1)
            if c.pictures:
                pixels += [patches for _, patches, _ in c.pictures]
                grids.append(torch.tensor([grid for *_, grid in c.pictures]))
                offsets = get_rope_index(masked[-1], grids[-1], config)
            positions.append(next_position + offsets)
    vision_index = torch.isin(torch.cat(masked), placeholders).nonzero()[:, 0]
    flat = [completion for group in groups for completion in group]
    embeds = [x.vision_embeds for x in prompts if x.vision_embeds is not None]
    nothing = torch.zeros(0, dtype=torch.long)  # for a batch without completions
    scored = torch.cat([nothing, *(c.ids for c in flat)])
    mask = join_masks(scored, [c.sampling_mask for c in flat if c.sampling_mask])
    return GroupBatch(
        input_ids=to_device(torch.cat(ids), device),
        position_ids=to_device(torch.cat(positions, dim=1), device),
        pixel_values=to_device(torch.cat(pixels), device),
        image_grid_thw=torch.cat(grids),
        vision_index=to_device(vision_index, device),
        completion_ids=to_device(scored, device),
        written=to_device(torch.cat([nothing, *(c.written for c in flat)]).float(), device),
        sampling_mask=to_device(mask, device),
        layout=layout,
        prompts=prompts,
        vision_embeds=torch.cat(embeds) if len(embeds) == len(pixels) else None,
    )


@dataclass
class MicroBatch:
    """What one forward and backward of training works on."""

    group: GroupBatch
    loss_mask: Tensor  # (R, T) float32, 1 for tokens that are trained on
    counts: object  # losses.Counts, of the whole optimizer step: what its loss divides by
    completion_index: Tensor | None = None  # (R,) which of this rank's completions of a rollout
    sampler_logps: Tensor | None = None  # (R, T) recorded while sampling
    old_per_token_logps: Tensor | None = None  # (R, T); None: the policy has not moved since
    ref_per_token_logps: Tensor | None = None  # (R, T); None: there is no reference
    advantages: Tensor | None = None  # (R,) or (R, T)

    @property
    def weight(self) -> float:
        """The weight of its metrics in the step's: how many tokens they are means over."""
        return float(self.loss_mask.sum())

    def mean(self, per_token: Tensor) -> Tensor:
        """Mean of a flat (M,) tensor over the tokens that are trained on."""
        total = (self.group.pad(per_token.detach()) * self.loss_mask).sum()
        return total / self.loss_mask.sum().clamp(min=1)


@dataclass
class Step:
    """One optimizer step."""

    micro_batches: list[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # the same on all ranks
    ends_rollout: bool = True  # a state of the run is only written after such a step
    rollout: object | None = None  # the grpo.Rollout that it trains on ...
    prompts: range = range(0)  # ... and which of its prompts
