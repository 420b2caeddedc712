"""Qwen3.5, where three out of four decoder layers are recurrent and need no KV cache.

Recurrent layers run over a prompt once for all its completions. Each completion starts with a copy of the prompt's
final state: recurrent matrices and last convolution inputs. The vision tower is that of Qwen3-VL, without DeepStack.

Dimension letters: b rows with T tokens, N packed tokens, H heads, V value width, K query and key width, W convolution
channels, D head_dim.
Source: Gated Delta Networks (arXiv 2412.06464); modeling_qwen3_5.py in transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.errors import require
from minivlmrl.extras.families.gated_delta_rule import gated_delta_rule
from minivlmrl.extras.families.qwen3_vl import Qwen3VisionConfig, Qwen3VL, Qwen3VLConfig
from minivlmrl.kernels.dense_attention import Reorder
from minivlmrl.kernels.rms_norm import RMSNorm
from minivlmrl.model.attention import Attention, DecodeAttention
from minivlmrl.model.config import ModelConfig, Size, TokenId
from minivlmrl.model.decoder import DecoderLayer, SelfAttention
from minivlmrl.model.rope import apply_rotary


@dataclass
class Qwen3_5Config(Qwen3VLConfig):
    """Qwen3.5 decoder config with transformers defaults."""

    rope_theta: Annotated[float, "(0, inf)"] = 1e4
    mrope_section: tuple[TokenId, TokenId, TokenId] = (11, 11, 10)
    head_dim: Size = 256
    # fraction of head_dim that gets rotary embeddings
    partial_rotary_factor: Annotated[float, "(0, 1]"] = 0.25
    # every n-th layer has full attention, the others are recurrent
    full_attention_interval: Size = 4
    # layer types; if empty, computed from full_attention_interval
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = ()
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Annotated[int, ">= 2"] = 4  # convolution length in tokens
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    image_token_id: TokenId = 248056
    video_token_id: TokenId = 248057
    vision_start_token_id: TokenId = 248053
    vision_end_token_id: TokenId = 248054

    def __post_init__(self):
        if not self.layer_types:
            for number in range(1, self.num_hidden_layers + 1):
                is_full = number % self.full_attention_interval == 0
                self.layer_types += ("full_attention" if is_full else "linear_attention",)
        types = list(self.layer_types)
        require(
            len(types) == self.num_hidden_layers and "full_attention" in types,
            "layer_types",
            types,
            f"a list of {self.num_hidden_layers} layer types with at least one full_attention",
        )
        num_values = self.linear_num_value_heads
        num_keys = self.linear_num_key_heads
        name = "linear_num_key_heads"
        require(num_values % num_keys == 0, name, num_keys, f"a divisor of linear_num_value_heads ({num_values})")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


class CenteredRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, not by weight, and computes in float32."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, scale, self.eps).to(x.dtype)


class Layer(DecoderLayer):
    """Decoder layer with GatedAttention or GatedDeltaNet, depending on config.layer_types."""

    norm_type = CenteredRMSNorm
    attention_type = None

    def __init__(self, model_config: Qwen3_5Config, index: int):
        super().__init__(model_config, index)
        if model_config.layer_types[index] == "linear_attention":
            self.linear_attn = GatedDeltaNet(model_config, index)
        else:
            # the KV cache contains only the attention layers
            cache_index = model_config.layer_types[:index].count("full_attention")
            self.self_attn = GatedAttention(model_config, cache_index)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        if hasattr(self, "linear_attn"):
            return self.linear_attn(x, attention)
        return self.self_attn(x, cos, sin, attention)


class GatedAttention(SelfAttention):
    """Attention with an output gate and partial rotary embeddings."""

    def __init__(self, model_config: ModelConfig, index: int):
        super().__init__(model_config, index)
        self.q_proj = nn.Linear(model_config.hidden_size, 2 * self.q_proj.out_features, bias=False)
        self.q_norm = CenteredRMSNorm(self.head_dim, model_config.rms_norm_eps)
        self.k_norm = CenteredRMSNorm(self.head_dim, model_config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q_and_gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim))  # queries and gates (N, H, 2 D)
        q, gate = q_and_gate.chunk(2, dim=-1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # keys (N, key heads, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_partial_rotary(self.q_norm(q), cos, sin)
        k = apply_partial_rotary(self.k_norm(k), cos, sin)
        out = attention(self.index, q, k, v) * gate.sigmoid()  # gated outputs (N, H, D)
        return self.o_proj(out.flatten(1))


def apply_partial_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to the first cos.shape[-1] features of x (N, H, D); keep the others."""
    count = cos.shape[-1]
    rotated = apply_rotary(x[..., :count], cos, sin)
    return torch.cat([rotated, x[..., count:]], dim=-1)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: linear attention after a causal convolution, with a (K, V) state matrix per head."""

    resets_itself = True

    def __init__(self, model_config: Qwen3_5Config, index: int):
        super().__init__()
        self.index = index
        self.k_heads = model_config.linear_num_key_heads
        self.v_heads = model_config.linear_num_value_heads
        self.k_dim = model_config.linear_key_head_dim
        self.v_dim = model_config.linear_value_head_dim
        key_width = self.k_heads * self.k_dim
        value_width = self.v_heads * self.v_dim
        self.sizes = [key_width, key_width, value_width]  # widths of q, k and v, all heads together
        width = sum(self.sizes)
        hidden_size = model_config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden_size, width, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, value_width, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, self.v_heads, bias=False)
        taps = model_config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(width, width, taps, groups=width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.v_heads))
        self.A_log = nn.Parameter(torch.empty(self.v_heads))
        self.norm = RMSNorm(self.v_dim, model_config.rms_norm_eps)
        self.out_proj = nn.Linear(value_width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Initialize the decay to half-lives from 0.4 to 700 tokens."""
        dt = torch.logspace(-3, -1, self.v_heads)
        decay = torch.linspace(1, 16, self.v_heads)
        self.dt_bias.data.copy_(dt.expm1().log())
        self.A_log.data.copy_(decay.log())

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute outputs (N, hidden_size) from x (N, hidden_size)."""
        inputs = [self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)]
        out = run_recurrent_layer(attention, self.index, inputs, self.scan)  # outputs (N, H, V)
        gate = F.silu(self.in_proj_z(x)).view_as(out)
        return self.out_proj((self.norm(out) * gate).flatten(1))

    def initial_state(self, rows: Tensor) -> list[Tensor]:
        """Return zeros, the state before any token: convolution inputs (b, taps - 1, W), matrices (b, H, K, V)."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        taps = self.conv1d.kernel_size[0]
        last_inputs = rows.new_zeros(len(rows), taps - 1, sum(self.sizes))
        states = rows.new_zeros(len(rows), self.v_heads, self.k_dim, self.v_dim, dtype=wide)
        return [last_inputs, states]

    def scan(self, inputs: list[Tensor], layer_state: list[Tensor] | None):
        """Run the convolution and the recurrence over (b, T) tokens.

        Args:
            inputs: in_proj_qkv (b, T, W), in_proj_b (b, T, H) and in_proj_a (b, T, H).
            layer_state: state before the tokens, None = initial_state.
        Returns:
            results (b, T, H, V), and the state after the tokens
        """
        qkv, b, a = inputs
        last_inputs, state = self.initial_state(qkv) if layer_state is None else layer_state
        wide = state.dtype
        padded = torch.cat([last_inputs, qkv], dim=1)  # convolution inputs (b, taps - 1 + T, W)
        mixed = F.conv1d(padded.mT, self.conv1d.weight, groups=padded.shape[2])  # convolution outputs (b, W, T)
        q, k, v = F.silu(mixed.mT).to(wide).split(self.sizes, dim=-1)
        q = unit_length(q.unflatten(-1, (self.k_heads, -1)))  # queries (b, T, key heads, K)
        k = unit_length(k.unflatten(-1, (self.k_heads, -1)))
        repeat = self.v_heads // self.k_heads
        q = q * self.k_dim**-0.5
        q = q.repeat_interleave(repeat, dim=2)  # queries (b, T, H, K)
        k = k.repeat_interleave(repeat, dim=2)
        v = v.unflatten(-1, (self.v_heads, -1))  # values (b, T, H, V)
        beta = b.sigmoid().to(wide)  # (b, T, H) step size of the delta rule
        rate = F.softplus(a.to(wide) + self.dt_bias.to(wide))
        log_decay = -self.A_log.to(wide).exp() * rate  # (b, T, H)
        out, state = gated_delta_rule(q, k, v, beta, log_decay, state)
        last_inputs = padded[:, qkv.shape[1] :]
        return out.to(qkv.dtype), [last_inputs, state]


def unit_length(x: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    squared_length = x.square().sum(-1, keepdim=True)
    return x * (squared_length + 1e-6).rsqrt()


def run_recurrent_layer(attention: Attention, index: int, inputs: list[Tensor], scan: Callable) -> Tensor:
    """Run a recurrent layer over packed prompts and completions, or over the new tokens in a decode step.

    Args:
        index: position of the layer in attention.layer_states.
        inputs: tensors (N, ...) with the layer inputs for N packed tokens.
        scan: function (inputs (b, T, ...), state) -> (results (b, T, ...), next state).
    Returns:
        results (N, ...), in packed order
    """
    if isinstance(attention, DecodeAttention):
        return _decode_recurrent_layer(attention, index, inputs, scan)
    layout = attention.layout
    results = []
    states = []
    # per input tensor and prompt length: a prompt batch, and completion batches
    blocks = [layout.blocks(x.unsqueeze(1)) for x in inputs]
    for *pairs, slots in zip(*blocks, layout.slots, strict=True):
        prompts = [prompt_block[:, 0] for prompt_block, _ in pairs]
        out, state = scan(prompts, None)
        results.append(out.flatten(0, 1))
        states.append(state)
        completion_blocks = [blocks for _, blocks in pairs]
        for *completions, part in zip(*completion_blocks, slots, strict=True):
            completion_inputs = [block[:, 0] for block in completions]
            prompt_state = [part.expand_to_rows(x) for x in state]
            out, _ = scan(completion_inputs, prompt_state)
            results.append(out.flatten(0, 1))
    if attention.keep_keys:  # store states for decoding, in prompt order
        order = layout.inverse[layout.last_index].argsort().argsort()
        all_states = [torch.cat(parts) for parts in zip(*states, strict=True)]
        attention.layer_states[index] = [x[order] for x in all_states]
    return Reorder.apply(torch.cat(results), layout.inverse)


def _decode_recurrent_layer(attention: DecodeAttention, index: int, inputs: list[Tensor], scan: Callable) -> Tensor:
    results = []
    for rows, tokens in attention.spans:
        state = [stored[rows] for stored in attention.layer_states[index]]
        row_inputs = [x[tokens].unflatten(0, (len(state[0]), -1)) for x in inputs]
        out, state_after = scan(row_inputs, state)
        for stored, changed in zip(state, state_after, strict=True):
            stored.copy_(changed)  # in place, because CUDA graphs need fixed addresses
        results.append(out.flatten(0, 1))
    return torch.cat(results)


class Qwen3_5(Qwen3VL):
    architecture = "Qwen3_5ForConditionalGeneration"
    config_type = Qwen3_5Config
    vision_config_type = Qwen3VisionConfig
    layer_type = Layer
    supported: ClassVar[dict[str, tuple]] = {
        **Qwen3VL.supported,
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
    }
    # weights for multi-token prediction, not loaded
    unused_prefixes = ("mtp.",)
    in_vllm = False

    def write_config(self, config: dict) -> dict:
        """Convert a flat config to Qwen3.5's nested config.json."""
        config = super().write_config(config)
        text = config["text_config"]
        text["layer_types"] = list(text["layer_types"])
        text["rope_parameters"] = {
            **text.pop("rope_scaling"),
            "rope_theta": text.pop("rope_theta"),
            "partial_rotary_factor": text.pop("partial_rotary_factor"),
        }
        return config
