"""Qwen3.5: three of its decoder's four layers have a memory of fixed size instead of keys.

A recurrence sees no mask, so no mask can keep the spans of a packed run apart. It need not: a
prompt is run once, and each of its completions goes on from a copy of what the layer then keeps,
its state and the last inputs of its convolution. `go_on` does this, in training and in decoding.

The fourth layers attend, with a gate on what they saw, and turn a part of each head alone. Norms
scale by 1 + weight. The tower is Qwen3-VL's without DeepStack.

Dimension letters: N tokens of the packed run, b rows of T tokens, H heads of V values, W numbers
that the convolution mixes, K numbers of a query or key, D head_dim.
Source: Gated Delta Networks (arXiv 2412.06464); modeling_qwen3_5.py of transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.kernels.dense_attention import Reorder
from minivlmrl.kernels.gated_delta_rule import gated_delta_rule
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.model.attention import Attention, DecodeAttention
from minivlmrl.model.config import ModelConfig, RecurrentConfig
from minivlmrl.model.decoder import DecoderLayer, Qwen2_5_VL, SelfAttention
from minivlmrl.model.families import qwen3_vl
from minivlmrl.model.rope import apply_rotary


class CentredRMSNorm(nn.RMSNorm):
    """RMSNorm that scales by 1 + weight, in float32."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, scale, self.eps).to(x.dtype)


class Layer(DecoderLayer):
    """A decoder layer that attends or has a recurrence, as config.layer_types says."""

    norm_type = CentredRMSNorm
    attention_type = None  # added below, after the MLP: random weights are drawn in this order

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        if config.recurrent is not None and config.layer_types[index] == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, config.recurrent, index)
        else:  # keys are remembered of these layers alone
            key_index = config.layer_types[:index].count("full_attention")
            self.self_attn = GatedAttention(config, key_index)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        if hasattr(self, "linear_attn"):
            return self.linear_attn(x, attention)
        return self.self_attn(x, cos, sin, attention)


class GatedAttention(SelfAttention):
    """Attention whose q_proj makes a gate of the result too; cos, sin turn a part of each head."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.q_proj.out_features, bias=False)
        self.q_norm = CentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = CentredRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q_and_gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim))  # (N, H, 2 D)
        q, gate = q_and_gate.chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (N, key heads, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_partial_rotary(self.q_norm(q), cos, sin)
        k = apply_partial_rotary(self.k_norm(k), cos, sin)
        out = attention(self.index, q, k, v) * gate.sigmoid()  # (N, H, D)
        return self.o_proj(out.flatten(1))


def apply_partial_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first numbers of each head, as many as cos and sin have; the others stay."""
    count = cos.shape[-1]
    return torch.cat([apply_rotary(x[..., :count], cos, sin), x[..., count:]], dim=-1)


def empty_memories(model: Qwen2_5_VL, rows: Tensor) -> list[list[Tensor]]:
    """Make what each recurrent layer keeps of rows (b, ...) that have seen nothing."""
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNet)]
    return [layer.empty(rows) for layer in layers]


class GatedDeltaNet(nn.Module):
    """A matrix a head as memory; queries, keys and values see the last inputs by a convolution."""

    resets_itself = True  # its parameters begin as they are here, see build.initialize

    def __init__(self, config: ModelConfig, sizes: RecurrentConfig, index: int):
        super().__init__()
        self.index = index
        self.k_heads, self.v_heads = sizes.linear_num_key_heads, sizes.linear_num_value_heads
        self.k_dim, self.v_dim = sizes.linear_key_head_dim, sizes.linear_value_head_dim
        key_width = self.k_heads * self.k_dim
        value_width = self.v_heads * self.v_dim
        self.sizes = [key_width, key_width, value_width]  # of queries, keys and values
        width = sum(self.sizes)  # W
        hidden_size = config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden_size, width, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, value_width, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, self.v_heads, bias=False)
        taps = sizes.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(width, width, taps, groups=width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads))
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.norm = RMSNorm(self.v_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(value_width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Let heads forget half after 0.4 to 700 tokens; softplus(dt_bias) is 0.001 to 0.1."""
        self.dt_bias.data.copy_(torch.logspace(-3, -1, self.v_heads).expm1().log())
        self.A_log.data.copy_(torch.linspace(1, 16, self.v_heads).log())

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """(N, hidden_size) -> the same; `attention` knows what follows what in the run."""
        inputs = [self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)]
        out = go_on(attention, self.index, inputs, self.scan)  # (N, H, V)
        gate = F.silu(self.in_proj_z(x)).view_as(out)
        return self.out_proj((self.norm(out) * gate).flatten(1))

    def empty(self, rows: Tensor) -> list[Tensor]:
        """Make the memory of rows (b, ...) that have seen nothing.

        The last inputs of the convolution, (b, taps - 1, W), and states (b, H, K, V) in float32 or
        wider.
        """
        wide = torch.promote_types(rows.dtype, torch.float32)
        taps = self.conv1d.kernel_size[0]
        last_inputs = rows.new_zeros(len(rows), taps - 1, sum(self.sizes))
        states = rows.new_zeros(len(rows), self.v_heads, self.k_dim, self.v_dim, dtype=wide)
        return [last_inputs, states]

    def scan(self, inputs: list[Tensor], memory: list[Tensor] | None):
        """Run T tokens of b rows.

        Args:
            inputs: what the three projections make of x: (b, T, W), (b, T, H), (b, T, H).
            memory: what came before, see `empty`; None: nothing.
        Returns:
            results (b, T, H, V), and the memory after them.
        """
        qkv, b, a = inputs
        last_inputs, state = self.empty(qkv) if memory is None else memory
        wide = state.dtype
        qkv_seen = torch.cat([last_inputs, qkv], dim=1)  # (b, taps - 1 + T, W)
        mixed = F.conv1d(qkv_seen.mT, self.conv1d.weight, groups=qkv_seen.shape[2]).mT  # (b, T, W)
        q, k, v = F.silu(mixed).to(wide).split(self.sizes, dim=-1)
        q = unit_length(q.unflatten(-1, (self.k_heads, -1)))  # (b, T, key heads, K)
        k = unit_length(k.unflatten(-1, (self.k_heads, -1)))
        repeat = self.v_heads // self.k_heads
        q = (q * self.k_dim**-0.5).repeat_interleave(repeat, dim=2)  # (b, T, H, K)
        k = k.repeat_interleave(repeat, dim=2)
        v = v.unflatten(-1, (self.v_heads, -1))  # (b, T, H, V)
        beta = b.sigmoid().to(wide)  # (b, T, H), how much of an old value is replaced
        rate = F.softplus(a.to(wide) + self.dt_bias.to(wide))
        log_decay = -self.A_log.to(wide).exp() * rate  # (b, T, H)
        out, state = gated_delta_rule(q, k, v, beta, log_decay, state)
        return out.to(qkv.dtype), [qkv_seen[:, qkv.shape[1] :], state]


def unit_length(x: Tensor) -> Tensor:
    """Scale vectors (the last axis) to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def go_on(attention: Attention, index: int, inputs: list[Tensor], scan: Callable) -> Tensor:
    """Run a recurrent layer over a packed run, or over new tokens of rows in decoding.

    Args:
        attention: its layout has the spans, and its `memory` what is kept of this layer (index).
        inputs: each (N, ...); the result is (N, ...) too.
        scan: (inputs of b rows, each (b, T, ...), memory) -> results (b, T, ...), memory after it.
    """
    if isinstance(attention, DecodeAttention):
        return _go_on_decoding(attention, index, inputs, scan)
    layout = attention.layout
    results = []
    memories = []
    blocks = [layout.blocks(x.unsqueeze(1)) for x in inputs]  # pairs, one for each prompt length
    for *pairs, slots in zip(*blocks, layout.slots, strict=True):
        prompts = [prompt_block[:, 0] for prompt_block, _ in pairs]  # each (b, T, ...)
        completions = [completion_block[:, 0] for _, completion_block in pairs]
        out, memory = scan(prompts, None)
        results.append(out.flatten(0, 1))
        memories.append(memory)
        if slots is not None:  # each from a copy of its prompt's memory
            out, _ = scan(completions, [slots.expand_to_rows(x) for x in memory])
            results.append(out.flatten(0, 1))
    if attention.keep_keys:  # for decoding, in the order of the prompts
        order = layout.inverse[layout.last_index].argsort().argsort()
        attention.recurrent_state[index] = [
            torch.cat(kept)[order] for kept in zip(*memories, strict=True)
        ]
    return Reorder.apply(torch.cat(results), layout.inverse)


def _go_on_decoding(
    attention: DecodeAttention, index: int, inputs: list[Tensor], scan: Callable
) -> Tensor:
    """Run a recurrent layer over the new tokens of each row."""
    results = []
    for rows, tokens in attention.spans:
        memory = [kept[rows] for kept in attention.recurrent_state[index]]
        row_inputs = [x[tokens].unflatten(0, (len(memory[0]), -1)) for x in inputs]
        out, memory_after = scan(row_inputs, memory)
        for kept, changed in zip(memory, memory_after, strict=True):
            kept.copy_(changed)  # where it is: a CUDA graph reads it there
        results.append(out.flatten(0, 1))
    return torch.cat(results)


# what config.json does not say, and transformers' defaults for what it may leave out
NO_DEEPSTACK = {"deepstack_visual_indexes": ()}
TOWER = qwen3_vl.TOWER | NO_DEEPSTACK
LAYERS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
TEXT_DEFAULTS = {
    **LAYERS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "mrope_section": [11, 11, 10],
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def write_config(config: dict) -> dict:
    """Nest a flat config, as the hub has it."""
    config = qwen3_vl.write_config(config)
    text = config["text_config"]
    text["layer_types"] = list(text["layer_types"])
    text["rope_parameters"] = {
        **text.pop("rope_scaling"),
        "rope_theta": text.pop("rope_theta"),
        "partial_rotary_factor": text.pop("partial_rotary_factor"),
    }
    return config


QWEN3_VL = qwen3_vl.SPECS["qwen3_vl"]
SPECS = {
    "qwen3_5": replace(
        QWEN3_VL,
        architecture="Qwen3_5ForConditionalGeneration",
        tower=TOWER,
        text=qwen3_vl.TEXT,
        defaults=TEXT_DEFAULTS,
        read_vision=lambda vision, where: qwen3_vl.VISION_DEFAULTS | vision | NO_DEEPSTACK,
        write=write_config,
        unread=("mtp.",),  # a layer that predicts the token after the next
        empty_memories=empty_memories,
        in_vllm=False,
        model=partial(QWEN3_VL.model, layer_type=Layer),
    )
}
