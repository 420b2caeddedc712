"""Qwen2.5-VL and Qwen2-VL: vision tower, decoder, head. Parameter names are those of the hub's checkpoints."""

import math

import torch
from torch import Tensor, nn

from minivlmrl.model.attention import GroupAttention
from minivlmrl.model.batch import GroupBatch
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.text import Rule, TextModel
from minivlmrl.model.vision import VisionTransformer


class Qwen2_5_VL(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.visual = VisionTransformer(config.vision_config)
        self.model = TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: GroupBatch, rule: Rule | None = None, wanted: Tensor | None = None) -> Tensor:
        """Hidden states of a packed run; each prompt and each image or video is computed once.

        Args:
            batch: N tokens.
            rule: the attention rule, by default GroupAttention(batch.layout).
            wanted: (W,) places whose hidden states are asked for; None: all N.
        Returns:
            hidden_states (W, hidden_size) after the final norm; `lm_head` makes logits of them.
        """
        x = self.model.embed_tokens(batch.input_ids)  # (N, hidden_size)
        if len(batch.grid_thw):
            vision_embeds = self.visual(batch.pixel_values, batch.grid_thw)
            x = x.index_copy(0, batch.vision_index, vision_embeds.to(x.dtype))
        return self.model(x, batch.position_ids, rule or GroupAttention(batch.layout), wanted)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator):
        """Draw random weights for training from scratch.

        Every matrix keeps the variance of what passes through it, N(0, 1/fan_in); projections that write into the
        residual stream are scaled by 1/sqrt(2 * depth) so that the sum over blocks does not grow. Embeddings get a
        standard deviation of 0.02, norms 1, biases 0.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter.normal_(0, 0.02, generator=generator)
            elif parameter.dim() > 1:
                depth = len(self.visual.blocks) if name.startswith("visual.") else len(self.model.layers)
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight", "fc2.weight", "attn.proj.weight"))
                scale = 1 / math.sqrt(2 * depth) if writes_residual else 1.0
                parameter.normal_(0, scale / math.sqrt(parameter[0].numel()), generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
