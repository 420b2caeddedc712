"""Decoder and LM head for Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with the hub's parameter names.

Dimensions: N tokens, H query heads, K key/value heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from minivlmrl.config.types import Part
from minivlmrl.kernels.dense_attention import gather_rows
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.model.attention import Attention, GroupAttention
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.rope import apply_rotary, text_rotary
from minivlmrl.model.vision import MLP, VisionTower


class VisionLanguageModel(nn.Module):
    """Vision tower, decoder and LM head, for any family."""

    sharding: Any = None  # Sharding from distributed/fsdp.py, None = all weights on all ranks
    save_dtype: torch.dtype | None = None  # checkpoint dtype, None = current dtype
    modules_to_save: Sequence[Part] = ()  # model parts trained in full, in addition to adapters

    def __init__(
        self,
        model_config: ModelConfig,
        # vision tower class, called with config.vision_config
        tower: Callable[..., VisionTower],
        layer_type: "type[DecoderLayer]",
    ):
        super().__init__()
        self.config = model_config
        self.visual = tower(model_config.vision_config)
        self.model = TextModel(model_config, layer_type)
        self.lm_head = nn.Linear(model_config.hidden_size, model_config.vocab_size, bias=False)
        if model_config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def blocks(self) -> list[nn.Module]:
        """Return vision and decoder blocks, for sharding and activation checkpointing."""
        return [*self.visual.blocks, *self.model.layers]

    def forward(self, batch: GroupBatch, attention: Attention | None = None, select: Tensor | None = None) -> Tensor:
        """Compute hidden states for a packed batch.

        Args:
            batch: N packed tokens.
            attention: by default GroupAttention(batch.layout).
            select: (S,) token indices, None = all N.
        Returns:
            (S, hidden_size) hidden states after the final norm, for `lm_head`.
        """
        x = gather_rows(self.model.embed_tokens.weight, batch.input_ids)  # (N, hidden_size)
        deep = []
        if len(batch.image_grid_thw):
            vision_embeds = batch.vision_embeds
            if vision_embeds is None:
                vision_embeds = self.visual(batch.pixel_values, batch.image_grid_thw)
            x, deep = place_images(x, vision_embeds, batch.vision_index)
        return self.model(
            x, batch.position_ids, attention or GroupAttention(batch.layout), select, batch.vision_index, deep
        )


def place_images(x: Tensor, vision_embeds: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Write vision tower outputs into the placeholder rows of x (N, hidden_size)."""
    first, *deep = vision_embeds.to(x.dtype).split(x.shape[1], dim=-1)
    return x.index_copy(0, index, first), deep


class TextModel(nn.Module):
    """Decoder: token embeddings, layers, final norm."""

    def __init__(self, model_config: ModelConfig, layer_type: "type[DecoderLayer]"):
        super().__init__()
        self.config = model_config
        self.embed_tokens = nn.Embedding(model_config.vocab_size, model_config.hidden_size)
        self.layers = nn.ModuleList(layer_type(model_config, i) for i in range(model_config.num_hidden_layers))
        self.norm = layer_type.norm_type(model_config.hidden_size, model_config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        attention: Attention,
        select: Tensor | None = None,
        vision_index: Tensor | None = None,
        deep: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run all layers and the final norm, but the last layer's MLP only for selected tokens.

        Args:
            x: (N, hidden_size) token embeddings.
            position_ids: (3, N) from get_rope_index.
            select: (S,) token indices to return, None = all N.
            vision_index: (M,) image token indices in x.
            deep: DeepStack outputs (M, hidden_size) of inner tower blocks; layer i adds deep[i] to image tokens.
        Returns:
            (S, hidden_size) hidden states.
        """
        cos, sin = text_rotary(position_ids, self.config, x.dtype)
        for i, layer in enumerate(self.layers[:-1]):
            x = layer(x, cos, sin, attention)
            if i < len(deep):
                x = x.index_add(0, cast(Tensor, vision_index), deep[i])
        return self.norm(self.layers[-1](x, cos, sin, attention, select))


class SelfAttention(nn.Module):
    """Grouped-query attention, with biases on q, k and v in Qwen2, and norms on q and k heads in Qwen3."""

    def __init__(self, model_config: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.head_dim = model_config.head_dim
        width = model_config.num_attention_heads * self.head_dim
        key_width = model_config.num_key_value_heads * self.head_dim
        project = partial(nn.Linear, model_config.hidden_size, bias=model_config.attention_bias)
        self.q_proj = project(width)
        self.k_proj = project(key_width)
        self.v_proj = project(key_width)
        norm = RMSNorm if model_config.qk_norm else nn.Identity
        self.q_norm = norm(self.head_dim, model_config.rms_norm_eps)
        self.k_norm = norm(self.head_dim, model_config.rms_norm_eps)
        self.o_proj = nn.Linear(width, model_config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        # queries (N, H, D), keys and values (N, K, D)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q = apply_rotary(self.q_norm(q), cos, sin)
        k = apply_rotary(self.k_norm(k), cos, sin)
        return self.o_proj(attention(self.index, q, k, v).flatten(1))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then MLP, with residual connections."""

    norm_type: type[nn.RMSNorm] = RMSNorm
    attention_type: type[SelfAttention] | None = SelfAttention
    mlp: nn.Module

    def __init__(self, model_config: ModelConfig, index: int):
        super().__init__()
        self.input_layernorm = self.norm_type(model_config.hidden_size, model_config.rms_norm_eps)
        if self.attention_type:
            self.self_attn = self.attention_type(model_config, index)
        self.post_attention_layernorm = self.norm_type(model_config.hidden_size, model_config.rms_norm_eps)
        self.mlp = MLP(model_config.hidden_size, model_config.intermediate_size, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Compute the attention branch from normalized hidden states (N, hidden_size)."""
        return self.self_attn(x, cos, sin, attention)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, select: Tensor | None = None
    ) -> Tensor:
        x = x + self.attend(self.input_layernorm(x), cos, sin, attention)
        if select is not None:
            x = gather_rows(x, select)
        return x + self.mlp(self.post_attention_layernorm(x))
