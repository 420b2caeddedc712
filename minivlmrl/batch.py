"""The one batch type: a packed run of prompts, each followed by its completions, and the images of the prompts.

SFT is a prompt with one completion, GRPO a prompt with G, prefill a prompt with none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.attention import GroupLayout
from minivlmrl.hub.config import ModelConfig
from minivlmrl.rope import get_rope_index
from minivlmrl.rows import Prompt


@dataclass
class GroupBatch:
    """N tokens in one run, no padding."""

    input_ids: Tensor  # (N,) int64, without the last token of each completion: nothing follows it
    position_ids: Tensor  # (3, N) int64: time, height, width
    pixel_values: Tensor  # (patches, patch_dim) float32, images and videos of all prompts in order
    image_grid_thw: Tensor  # (images and videos, 3) int64
    vision_index: Tensor  # (merged image and video tokens,) their places in the run, prompts only
    completion_ids: Tensor  # (M,) int64, the tokens that are scored, completions in order
    layout: GroupLayout

    def split(self, per_token: Tensor) -> list[Tensor]:
        """Cut a flat (M,) tensor over completion tokens into one piece per completion."""
        return list(per_token.split(self.layout.row_lengths))

    def pad(self, per_token: Tensor) -> Tensor:
        """(M,) over completion tokens -> (R, longest completion), zeros on the right: the form the losses take."""
        return torch.nn.utils.rnn.pad_sequence(self.split(per_token), batch_first=True)

    @property
    def completion_mask(self) -> Tensor:
        """(R, longest completion), 1 where a row has a token. From lengths: what the tokens are plays no part."""
        return self.pad(torch.ones_like(self.completion_ids, dtype=torch.float32))


def pack(
    prompts: Sequence[Prompt], completions: Sequence[Sequence[Tensor]], config: ModelConfig, device="cpu"
) -> GroupBatch:
    """Lay prompts and their completions end to end.

    Example: a prompt of 3 tokens with completions a of 3 and b of 2 tokens gives N = 6 and M = 5,
        run       p0 p1 p2 | a0 a1 | b0
        position   0  1  2 |  3  4 |  3        each completion goes on where its prompt ended
        predicts        a0   a1 a2   b1        p2 predicts b0 as well

    Args:
        prompts: B of them.
        completions: for each prompt the token ids of its completions, each (C,) int64, C >= 1; may be empty.
    Raises:
        ValueError: a completion without tokens, or a prompt whose image and video tokens do not fit its grids.
    """
    if any(len(completion) == 0 for group in completions for completion in group):
        raise ValueError("a completion has no tokens; drop its row or let it end with a stop token")
    lengths = [[len(completion) for completion in group] for group in completions]
    layout = GroupLayout([len(prompt.input_ids) for prompt in prompts], lengths, device)
    ids = torch.cat([
        piece for prompt, group in zip(prompts, completions, strict=True)
        for piece in (prompt.input_ids, *(completion[:-1].cpu() for completion in group))
    ])  # fmt: skip
    positions, vision_index, following = torch.empty(3, len(ids), dtype=torch.long), [], []
    for prompt, start in zip(prompts, layout.prompt_starts.tolist(), strict=True):
        own = get_rope_index(prompt.input_ids, prompt.image_grid_thw, config, prompt.second_per_grid_ts)  # (3, P)
        positions[:, start : start + own.shape[1]] = own
        is_vision = (prompt.input_ids == config.image_token_id) | (prompt.input_ids == config.video_token_id)
        vision_index.append(is_vision.nonzero()[:, 0] + start)
        following.append(int(own.max()) + 1)
    group, offset, predict = (
        x.cpu() for x in (layout.completion_group, layout.completion_offset, layout.predict_index)
    )
    inside = offset > 0  # what predicts the first token of a completion lies in the prompt
    positions[:, predict[inside]] = torch.tensor(following)[group[inside]] + offset[inside] - 1
    completion_ids = [completion for group in completions for completion in group]
    return GroupBatch(
        ids.to(device),
        positions.to(device),
        torch.cat([p.pixel_values for p in prompts]).to(device),
        torch.cat([p.image_grid_thw for p in prompts]),
        torch.cat(vision_index).to(device),
        torch.cat([torch.zeros(0, dtype=torch.long), *completion_ids]).to(device),
        layout,
    )
