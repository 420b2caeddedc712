"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: embeddings and vision tower, decoder layers, head.

The decoder works on a packed run of N tokens; its argument `attention` knows which of them see
each other. model/families/registry.py says which tower, layers and norm each has. Names are those of the hub.

Dimension letters: N tokens, H query heads, K key/value heads, D head_dim. `config` is the
ModelConfig of model/config.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from minivlmrl.kernels.dense_attention import gather_rows
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.model.attention import Attention, GroupAttention
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.rope import apply_rotary, text_rotary
from minivlmrl.model.vision import MLP, VisionTower, VisionTransformer

if TYPE_CHECKING:
    from minivlmrl.model.config import ModelConfig, VisionConfig


class Sharder(Protocol):
    """Shards the weights of models over the ranks: distributed/fsdp.Sharding."""

    compute_dtype: torch.dtype  # of gathered weights and of activations

    def shard(self, model: "Qwen2_5_VL") -> None:
        """Shard a model on any device, also on the meta device."""

    def shard_head(self, head: nn.Module) -> None:
        """Shard a value head of a sharded model."""

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Copy this rank's rows of a full tensor, in the form of a sharded parameter."""
        ...

    def gather(self, model: "Qwen2_5_VL") -> "Qwen2_5_VL":
        """Gather a sharded model's weights, and make a plain model on them."""
        ...

    def copy(self, model: "Qwen2_5_VL", in_compute_dtype: bool) -> "Qwen2_5_VL":
        """Copy a sharded model, each rank its part."""
        ...


class Qwen2_5_VL(nn.Module):
    sharding: Sharder | None = None  # how the weights are sharded; None: every rank has all of them
    folder: Path | None = None  # the folder that the weights were read from

    def __init__(
        self,
        config: "ModelConfig",
        tower: Callable[["VisionConfig"], VisionTower] = VisionTransformer,
        layer_type: "type[DecoderLayer] | None" = None,
    ):
        super().__init__()
        self.config = config
        self.visual = tower(config.vision_config)
        self.model = TextModel(config, layer_type or DecoderLayer)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, batch: GroupBatch, attention: Attention | None = None, select: Tensor | None = None
    ) -> Tensor:
        """Run the model; each prompt and each image or video is computed once.

        Args:
            batch: N tokens.
            attention: who attends to whom, by default GroupAttention(batch.layout).
            select: (S,) indices of the tokens whose hidden states are needed; None: all N.
        Returns:
            hidden_states (S, hidden_size) after the final norm; `lm_head` makes logits of them.
        """
        x = gather_rows(self.model.embed_tokens.weight, batch.input_ids)  # (N, hidden_size)
        deep = []
        if len(batch.image_grid_thw):
            vision_embeds = batch.vision_embeds  # a frozen tower has made them before
            if vision_embeds is None:
                vision_embeds = self.visual(batch.pixel_values, batch.image_grid_thw)
            x, deep = place_images(x, vision_embeds, batch.vision_index)
        attention = attention or GroupAttention(batch.layout)
        return self.model(x, batch.position_ids, attention, select, batch.vision_index, deep)


def place_images(x: Tensor, vision_embeds: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Put the tower's embeddings of M image tokens at rows `index` (M,) of x (N, hidden_size).

    A tower with DeepStack returns (M, several * hidden_size): the first part is put there, the
    others are returned for TextModel's `deep`.
    """
    first, *deep = vision_embeds.to(x.dtype).split(x.shape[1], dim=-1)
    return x.index_copy(0, index, first), deep


class TextModel(nn.Module):
    def __init__(self, config: "ModelConfig", layer_type: "type[DecoderLayer]"):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer_type(config, i) for i in range(config.num_hidden_layers))
        self.norm = layer_type.norm_type(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, position_ids: Tensor, attention: Attention, select: Tensor | None = None,
        vision_index: Tensor | None = None, deep: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """Run all layers on embeddings x (N, hidden_size); see Qwen2_5_VL.forward.

        After layer i DeepStack adds deep[i] (M, hidden_size), made by an inner block of the tower,
        to the image tokens vision_index (M,). After the last attention tokens no longer interact,
        so the rest of the last layer runs on the selected tokens alone.
        """
        cos, sin = text_rotary(position_ids, self.config, x.dtype)
        for i, layer in enumerate(self.layers[:-1]):
            x = layer(x, cos, sin, attention)
            if vision_index is not None and i < len(deep):
                x = x.index_add(0, vision_index, deep[i])
        return self.norm(self.layers[-1](x, cos, sin, attention, select))


class SelfAttention(nn.Module):
    """Grouped-query attention. Qwen2 has biases of q, k and v; Qwen3 norms each head of q and k."""

    def __init__(self, config: "ModelConfig", index: int):
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, config.attention_bias)
        norm = RMSNorm if config.qk_norm else nn.Identity
        self.q_norm = norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = norm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, K, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_rotary(self.q_norm(q), cos, sin)
        k = apply_rotary(self.k_norm(k), cos, sin)
        return self.o_proj(attention(self.index, q, k, v).flatten(1))


class DecoderLayer(nn.Module):
    """Attention, then an MLP, each on what a norm makes of x and added to x.

    A family whose layers have other parts is a subclass that names them, see model/families/qwen3_5.py.
    """

    norm_type: type[nn.RMSNorm] = RMSNorm
    attention_type: type[SelfAttention] | None = SelfAttention
    mlp: nn.Module

    def __init__(self, config: "ModelConfig", index: int):
        super().__init__()
        self.input_layernorm = self.norm_type(config.hidden_size, config.rms_norm_eps)
        if self.attention_type:
            self.self_attn = self.attention_type(config, index)
        self.post_attention_layernorm = self.norm_type(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Let tokens x (N, hidden_size) see each other: (N, hidden_size), not yet added to x."""
        return self.self_attn(x, cos, sin, attention)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention,
        select: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x = x + self.attend(self.input_layernorm(x), cos, sin, attention)
        if select is not None:
            x = gather_rows(x, select)
        return x + self.mlp(self.post_attention_layernorm(x))
