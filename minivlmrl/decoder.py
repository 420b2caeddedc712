"""The decoder: Qwen2 with M-RoPE. It works on a packed run of N tokens and leaves who-sees-whom to the given rule.

Dimension letters: N tokens, H query heads, K key/value heads, D head_dim.


Qwen2.5-VL and Qwen2-VL: vision tower, decoder, head. Parameter names are those of the hub's checkpoints."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivlmrl.attention import GroupAttention
from minivlmrl.batch import GroupBatch
from minivlmrl.hub.config import ModelConfig
from minivlmrl.kernels.window_attention import gather_rows
from minivlmrl.rope import apply_rotary, text_rotary
from minivlmrl.vision import MLP, RMSNorm, VisionTransformer

Rule = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # see model/attention.py


class TextModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor, rule: Rule, wanted: Tensor | None = None) -> Tensor:
        """Run all layers.

        Args:
            inputs_embeds: (N, hidden_size).
            position_ids: (3, N) int64.
            rule: the attention rule, called once a layer.
            wanted: (W,) places whose hidden states are asked for; None: all N. Behind the last attention a token has
                nothing to say to the others any more, so the rest of that layer runs on the wanted ones alone.
        Returns:
            hidden_states (W, hidden_size) after the final norm.
        """
        cos, sin = text_rotary(position_ids, self.config, inputs_embeds.dtype)
        x = inputs_embeds
        for layer in self.layers[:-1]:
            x = layer(x, cos, sin, rule)
        return self.norm(self.layers[-1](x, cos, sin, rule, wanted))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, rule: Rule, wanted: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, rule)
        if wanted is not None:
            x = gather_rows(x, wanted)
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    """Grouped-query attention; query, key and value projections have biases, the output has none."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        width, key_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width)
        self.k_proj = nn.Linear(config.hidden_size, key_width)
        self.v_proj = nn.Linear(config.hidden_size, key_width)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, rule: Rule) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)  # (N, H, D), (N, K, D)
        return self.o_proj(rule(self.index, q, k, v).flatten(1))


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
        if len(batch.image_grid_thw):
            vision_embeds = self.visual(batch.pixel_values, batch.image_grid_thw)
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
