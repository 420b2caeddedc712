"""Qwen3.5: three of its decoder's four layers have a memory of fixed size instead of keys.

A recurrence sees no mask, so no mask can keep the spans of a packed run apart. It need not: a
prompt is run once, and each of its completions goes on from a copy of what the layer then keeps,
its state and the last inputs of its convolution. `go_on` does this, in training and in decoding.

The fourth layers attend, with a gate on what they saw, and turn a part of each head alone. Norms
scale by 1 + weight. The tower is Qwen3-VL's without DeepStack.

Dimension letters: N tokens of the packed run, b rows of T tokens, H heads of V values, W numbers
that the convolution mixes, K numbers of a query or key.
Source: Gated Delta Networks (arXiv 2412.06464); modeling_qwen3_5.py of transformers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.attention import Attention, DecodeAttention
from minivlmrl.decoder import SelfAttention
from minivlmrl.hub import qwen3_vl
from minivlmrl.kernels.dense_attention import Reorder, gather_rows
from minivlmrl.kernels.gated_delta_rule import gated_delta_rule
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.rope import apply_rotary
from minivlmrl.vision import MLP


class CentredRMSNorm(nn.RMSNorm):
    """RMSNorm that scales by 1 + weight, in float32."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, scale, self.eps).to(x.dtype)


class Layer(nn.Module):
    """decoder.DecoderLayer with the layer that config.layer_types names instead of attention."""

    norm_type = CentredRMSNorm

    def __init__(self, config, index: int):
        super().__init__()
        self.input_layernorm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=False)
        if config.layer_types[index] == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, index)
        else:  # keys are remembered of these layers alone
            index = config.layer_types[:index].count("full_attention")
            self.self_attn = GatedAttention(config, index)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, select=None):
        normed = self.input_layernorm(x)
        if hasattr(self, "linear_attn"):
            x = x + self.linear_attn(normed, attention)
        else:
            x = x + self.self_attn(normed, cos, sin, attention)
        if select is not None:
            x = gather_rows(x, select)
        return x + self.mlp(self.post_attention_layernorm(x))


class GatedAttention(SelfAttention):
    """Attention whose q_proj makes a gate of the result too; cos, sin turn a part of each head."""

    def __init__(self, config, index: int):
        super().__init__(config, index)
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.q_proj.out_features, bias=False)
        self.q_norm = CentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = CentredRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        q, k, count = self.q_norm(q), self.k_norm(k), cos.shape[-1]
        turned = (apply_rotary(x[..., :count], cos, sin) for x in (q, k))
        q, k = (torch.cat([y, x[..., count:]], -1) for x, y in zip((q, k), turned, strict=True))
        return self.o_proj((attention(self.index, q, k, v) * gate.sigmoid()).flatten(1))


class GatedDeltaNet(nn.Module):
    """A matrix a head as memory; queries, keys and values see the last inputs by a convolution."""

    def __init__(self, config, index: int):
        super().__init__()
        self.index, hidden = index, config.hidden_size
        self.k_heads, self.v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.k_dim, self.v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys = self.k_heads * self.k_dim
        values = self.v_heads * self.v_dim
        self.sizes = [keys, keys, values]
        width = 2 * keys + values
        self.in_proj_qkv = nn.Linear(hidden, width, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.v_heads, bias=False)
        taps = config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(width, width, taps, groups=width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads))
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.norm = RMSNorm(self.v_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Let heads forget half after 0.4 to 700 tokens; softplus(dt_bias) is 0.001 to 0.1."""
        self.dt_bias.data.copy_(torch.logspace(-3, -1, self.v_heads).expm1().log())
        self.A_log.data.copy_(torch.linspace(1, 16, self.v_heads).log())

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """(N, hidden_size) -> the same; `attention` knows what follows what in the run."""
        inputs = self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)
        out = go_on(attention, self.index, inputs, self.scan)  # (N, H, V)
        gate = F.silu(self.in_proj_z(x)).view_as(out)
        return self.out_proj((self.norm(out) * gate).flatten(1))

    def empty(self, rows: Tensor) -> list[Tensor]:
        """Make the memory of rows (b, ...) that have seen nothing: what the convolution of the
        next token needs, (b, taps - 1, W), and states (b, H, K, V) in float32 or wider."""
        inputs = len(rows), self.conv1d.kernel_size[0] - 1, sum(self.sizes)
        state = len(rows), self.v_heads, self.k_dim, self.v_dim
        wide = torch.promote_types(rows.dtype, torch.float32)
        return [rows.new_zeros(inputs), rows.new_zeros(state, dtype=wide)]

    def scan(self, inputs: list[Tensor], memory: list[Tensor] | None):
        """Run T tokens of b rows, each (b, T, ...), from a memory, None: from an empty one, to
        results (b, T, H, V) and the memory after them."""
        qkv, b, a = inputs
        before, state = self.empty(qkv) if memory is None else memory
        seen = torch.cat([before, qkv], dim=1)
        wide = state.dtype
        mixed = F.conv1d(seen.mT, self.conv1d.weight, groups=seen.shape[2]).mT
        q, k, v = F.silu(mixed).to(wide).split(self.sizes, dim=-1)
        q, k = (x.unflatten(-1, (self.k_heads, -1)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))  # length 1
        repeat = self.v_heads // self.k_heads
        q, k = (x.repeat_interleave(repeat, dim=2) for x in (q * self.k_dim**-0.5, k))
        v, beta = v.unflatten(-1, (self.v_heads, -1)), b.sigmoid().to(wide)
        g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        out, state = gated_delta_rule(q, k, v, beta, g, state)
        return out.to(qkv.dtype), [seen[:, qkv.shape[1] :], state]


def go_on(attention: Attention, index: int, inputs: tuple, scan: Callable) -> Tensor:
    """Run a recurrent layer over a packed run, or over new tokens of rows in decoding.

    Args:
        attention: its layout has the spans, and its `memory` what is kept of this layer (index).
        inputs: each (N, ...); the result is (N, ...) too.
        scan: (inputs of b rows, each (b, T, ...), memory) -> results (b, T, ...), memory after it.
    """
    results = []
    memories = []
    if isinstance(attention, DecodeAttention):
        for rows, tokens in attention.spans:
            memory = [kept[rows] for kept in attention.memory[index]]
            new = [x[tokens].unflatten(0, (len(memory[0]), -1)) for x in inputs]
            out, after = scan(new, memory)
            for kept, x in zip(memory, after, strict=True):
                kept.copy_(x)  # where it is: a CUDA graph reads it there
            results.append(out.flatten(0, 1))
        return torch.cat(results)
    layout = attention.layout
    pairs = [layout.blocks(x.unsqueeze(1)) for x in inputs]  # of each input and prompt length
    for *blocks, slots in zip(*pairs, layout.slots, strict=True):
        prompts = [prompt_block[:, 0] for prompt_block, _ in blocks]  # each (b, P, ...)
        completions = [completion_block[:, 0] for _, completion_block in blocks]
        out, memory = scan(prompts, None)
        results.append(out.flatten(0, 1))
        memories.append(memory)
        if slots is not None:  # each from a copy of its prompt's memory
            out, _ = scan(completions, [slots.spread(x) for x in memory])
            results.append(out.flatten(0, 1))
    if attention.keys is not None:  # for decoding, in the order of the prompts
        order = layout.inverse[layout.last_index].argsort().argsort()
        attention.memory[index] = [torch.cat(x)[order] for x in zip(*memories, strict=True)]
    return Reorder.apply(torch.cat(results), layout.inverse)


# what config.json does not say, and transformers' defaults for what it may leave out
NO_DEEPSTACK = {"deepstack_visual_indexes": ()}
TOWER = qwen3_vl.TOWER | NO_DEEPSTACK
LAYERS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
LAYERS |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
TEXT_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "mrope_section": [11, 11, 10], **LAYERS}
TEXT_DEFAULTS |= {"head_dim": 256, "partial_rotary_factor": 0.25, "bos_token_id": None}
TEXT_DEFAULTS |= {"eos_token_id": None, "image_token_id": 248056, "video_token_id": 248057}
TEXT_DEFAULTS |= {"vision_start_token_id": 248053, "vision_end_token_id": 248054}


def write_config(config: dict) -> dict:
    """Nest a flat config, as the hub has it."""
    config = qwen3_vl.write_config(config)
    text = config["text_config"]
    rope = text.pop("rope_scaling")
    rope |= {name: text.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    text |= {"layer_types": list(text["layer_types"]), "rope_parameters": rope}
    text["model_type"] = "qwen3_5_text"
    return config
