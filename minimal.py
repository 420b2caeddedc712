"""Reinforcement learning for Qwen2.5-VL in one file, from an image file to an optimizer step.

    python minimal.py                          # a tiny model learns shapes on a CPU
    python minimal.py FOLDER rows.jsonl        # GRPO on your images, with a Hugging Face folder
    python minimal.py FOLDER rows.jsonl --sft  # rows need "completion"; --dpo: "chosen", "rejected"

A row is {"image": "cat.jpg", "problem": "How many cats are there?", "solution": "2"}. minimal.py
adds to the question a request for <think>...</think><answer>...</answer>: only these tags earn a
reward. SFT imitates given answers. GRPO samples several answers to a question, and makes those with
more reward more likely; a model that never writes <answer> needs SFT before. DPO makes a chosen
answer more likely than a rejected one.

For SFT, GRPO and DPO, Qwen2.5-VL-3B needs 70, 72 and 79 GB of GPU memory, and Qwen2.5-VL-7B needs
149, 153 and 168 GB (predicted by benchmarks/minimal_memory.py).

Read down to "# ==== You have read it all"; the rest reads and writes files. "# ---- A -> B" starts
code that turns A into B. Pages in docs/papers/ show the lines that LoRA, DAPO, GSPO and others
change. The package minivlmrl (README.md) trains faster, in less memory, on several GPUs.
"""

import argparse
import contextlib
import copy
import json
import math
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

# Letters in shapes: P patches in h rows and w columns, with 1176 values each: 3 channels x 2 frames
# x 14 x 14 pixels; n sequences with L tokens; G completions, the longest with T tokens; E decoder
# width, H heads with width D, V vocabulary size


# ---- Image file -> patches (P, 1176), as Qwen2-VL reads them (arXiv 2409.12191, section 2.1)

MEAN = np.float32([0.48145466, 0.4578275, 0.40821073])  # RGB means of CLIP's training images
STD = np.float32([0.26862954, 0.26130258, 0.27577711])  # RGB standard deviations


def load_image(file) -> Image.Image:
    """Read an image in RGB, apply its EXIF rotation, and replace transparency with white."""
    with open_image(file) as image:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")


def smart_resize(height, width, factor, min_pixels, max_pixels) -> tuple[int, int]:
    """Round height and width to multiples of factor, with an area of min_pixels to max_pixels."""
    sides = np.array([height, width])
    rounded = np.round(sides / factor) * factor
    if rounded.prod() > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rounded = np.maximum(factor, np.floor(sides / shrink / factor) * factor)
    elif rounded.prod() < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rounded = np.ceil(sides * grow / factor) * factor
    return int(rounded[0]), int(rounded[1])


def patchify(image, patch, merge, min_pixels, max_pixels) -> tuple[Tensor, int, int]:
    """Cut an image into patches (P, 3 * 2 * patch * patch), in h rows and w columns.

    The merge x merge patches of an image token have consecutive rows in the result.
    """
    height, width = smart_resize(image.height, image.width, patch * merge, min_pixels, max_pixels)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image) / 255  # (height, width, 3), from 0 to 1
    pixels = (pixels.astype(np.float32) - MEAN) / STD
    frames = np.stack([pixels, pixels])  # (2, height, width, 3), like two frames of a video
    h = height // patch
    w = width // patch
    x = frames.reshape(
        2,  # axis 0: video frame
        h // merge,  # axis 1: row of the image token
        merge,  # axis 2: row of patches within an image token
        patch,  # axis 3: row of pixels within a patch
        w // merge,  # axis 4: column of the image token
        merge,  # axis 5: column of patches within an image token
        patch,  # axis 6: column of pixels within a patch
        3,  # axis 7: color channel
    )
    # group patches by image token; order pixel values as in the vision tower's Conv3d weight
    x = x.transpose(1, 4, 2, 5, 7, 0, 3, 6)  # (h/merge, w/merge, merge, merge, 3, 2, patch, patch)
    patches = torch.from_numpy(x.reshape(h * w, -1))
    return patches, h, w


# ---- Row -> prompt: token ids (L,), M-RoPE positions (3, L), image patches


@dataclass
class Prompt:
    ids: Tensor  # (L,)
    positions: Tensor  # (3, L): time, row, column
    images: list[tuple[Tensor, int, int]]  # patches (P, 1176), h, w


def to_ids(tokenizer, text) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def render(tokenizer, problem, image_lengths) -> list[int]:
    r"""Return the token ids (L,) of a question in Qwen2.5-VL's chat template.

    <image> in the question becomes an image; without <image>, the images come first. An image of
    3 tokens and "What?" give the ids of this text, without its line breaks:
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>What?<|im_end|>\n
        <|im_start|>assistant\n
    """
    if "<image>" not in problem:
        problem = "<image>" * len(image_lengths) + problem
    first, *texts = problem.split("<image>")

    def control(name):  # `to_ids` would encode control tokens as plain text
        return [tokenizer.token_to_id(f"<|{name}|>")]

    start = control("im_start")
    end = control("im_end") + to_ids(tokenizer, "\n")
    ids = start + to_ids(tokenizer, "system\nYou are a helpful assistant.") + end
    ids += start + to_ids(tokenizer, f"user\n{first}")
    for length, text in zip(image_lengths, texts, strict=True):
        ids += control("vision_start")
        ids += control("image_pad") * length  # one placeholder per image token
        ids += control("vision_end") + to_ids(tokenizer, text)
    return ids + end + start + to_ids(tokenizer, "assistant\n")


def mrope_positions(ids, grids, image_token) -> Tensor:
    """Return token positions in time, row and column: (3, L) (arXiv 2409.12191, figure 3).

    A text token has the same time, row and column. Text after an image begins at the largest position + 1.
    Example: two text tokens, an image with 2 x 3 tokens and one more text token have
        time   0 1 | 2 2 2 2 2 2 | 5
        row    0 1 | 2 2 2 3 3 3 | 5
        column 0 1 | 2 3 4 2 3 4 | 5
    """
    grids = iter(grids)
    pieces = []
    position = 0
    done = 0
    while done < len(ids):
        rows, columns = 1, 1  # text token: like an image with 1 x 1 tokens
        if ids[done] == image_token:
            rows, columns = next(grids)
        time = torch.zeros(1, dtype=torch.long)
        offsets = torch.cartesian_prod(time, torch.arange(rows), torch.arange(columns))
        pieces.append(position + offsets.T)  # (3, rows * columns)
        position += max(rows, columns)
        done += rows * columns
    return torch.cat(pieces, 1)


def make_prompt(model, row) -> Prompt:
    """Convert a row to model inputs."""
    vision = model.config["vision_config"]
    patch = vision["patch_size"]
    merge = vision["spatial_merge_size"]
    min_pixels, max_pixels = model.pixels  # image area
    device = model.lm_head.weight.device
    images = []
    grids = []  # rows and columns of image tokens
    for file in row["images"]:
        patches, h, w = patchify(load_image(file), patch, merge, min_pixels, max_pixels)
        images.append((patches.to(device), h, w))
        grids.append((h // merge, w // merge))
    image_lengths = [rows * columns for rows, columns in grids]
    ids = render(model.tokenizer, row["problem"], image_lengths)
    positions = mrope_positions(ids, grids, model.config["image_token_id"])
    return Prompt(torch.tensor(ids, device=device), positions.to(device), images)


# ---- Shared by vision tower and language model; modules are named as in checkpoints


def recompute_in_backward(layer, x, *arguments):
    """Run a layer; on a GPU, keep only its inputs, and run it again in backward (checkpointing)."""
    if x.is_cuda and torch.is_grad_enabled():  # no dropout, so no random state to restore
        return checkpoint(layer, x, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(x, *arguments)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width, inner, bias):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias)
        self.up_proj = nn.Linear(width, inner, bias)
        self.down_proj = nn.Linear(inner, width, bias)

    def forward(self, x):
        gate = F.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


def frequencies(count, theta, device) -> Tensor:
    """Return rotary frequencies from 1 to about 1 / theta: (count,)."""
    exponents = torch.arange(count, dtype=torch.float32, device=device) / count
    return 1.0 / theta**exponents


def rotate(x, angles) -> Tensor:
    """Rotate pairs (x_i, x_{i+D/2}) in x (..., L, D) by angles (L, D/2) (arXiv 2104.09864).

    Rotated queries and keys have dot products that depend only on position differences.
    """
    a, b = x.chunk(2, -1)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# ---- Vision tower: patches (P, 1176) -> image tokens (P / 4, E) (arXiv 2502.13923)


class VisionBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_heads"]
        self.norm1 = nn.RMSNorm(width, 1e-6)
        projections = {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        self.attn = nn.ModuleDict(projections)
        self.norm2 = nn.RMSNorm(width, 1e-6)
        self.mlp = MLP(width, config["intermediate_size"], bias=True)

    def forward(self, x, angles, mask):
        qkv = self.attn["qkv"](self.norm1(x))  # (P, 3 * width)
        qkv = qkv.unflatten(-1, (3, self.heads, -1))  # (P, 3, H, D)
        q, k, v = qkv.permute(1, 2, 0, 3)  # (H, P, D) each
        q = rotate(q, angles)
        k = rotate(k, angles)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0]  # a batch of one
        out = out.transpose(0, 1).flatten(1)  # (P, width)
        x = x + self.attn["proj"](out)
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config["hidden_size"]
        merged = width * config["spatial_merge_size"] ** 2
        # a linear layer, stored as Conv3d in checkpoints
        kernel = (2, config["patch_size"], config["patch_size"])
        proj = nn.Conv3d(3, width, kernel, kernel, bias=False)
        self.patch_embed = nn.ModuleDict({"proj": proj})
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config["depth"]))
        out_width = config["out_hidden_size"]
        mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, out_width))
        self.merger = nn.ModuleDict({"ln_q": nn.RMSNorm(width, 1e-6), "mlp": mlp})

    def forward(self, patches, h, w):
        merge = self.config["spatial_merge_size"]
        kernels = self.patch_embed["proj"].weight.flatten(1)  # (width, 1176)
        x = F.linear(patches.to(kernels.dtype), kernels)  # (P, width)
        x = x.to(kernels.dtype)  # residual sums in float32: autocast made x bfloat16
        # (P, 2) row and column of patches
        places = torch.cartesian_prod(torch.arange(h), torch.arange(w)).to(x.device)
        places = places.view(h // merge, merge, w // merge, merge, 2)
        places = places.transpose(1, 2).reshape(h * w, 2)
        # rotary angles: half from the row, half from the column
        head_width = self.config["hidden_size"] // self.config["num_heads"]
        steps = frequencies(head_width // 4, 10000.0, x.device)
        angles = (places[..., None] * steps).flatten(1)  # (P, D/2)
        # Most blocks attend only within windows of patches. The mask returns the same numbers as
        # window attention, but costs P^2, like full attention.
        side = self.config["window_size"] // self.config["patch_size"]  # in patches
        side = side // merge * merge  # no window cuts an image token
        windows = places // side
        same_window = (windows[:, None] == windows).all(-1)  # (P, P)
        for i, block in enumerate(self.blocks):
            sees_all = i in self.config["fullatt_block_indexes"]
            x = recompute_in_backward(block, x, angles, None if sees_all else same_window)
        x = self.merger["ln_q"](x)
        x = x.view(h * w // merge**2, -1)  # (P / 4, 4 * width)
        return self.merger["mlp"](x)


# ---- Language model: token ids (n, L) -> states (n, L, E), KV cache


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.D = width // config["num_attention_heads"]
        self.queries_per_key = config["num_attention_heads"] // config["num_key_value_heads"]
        self.input_layernorm = nn.RMSNorm(width, config["rms_norm_eps"])
        key_width = width // self.queries_per_key
        projections = {
            "q_proj": nn.Linear(width, width),
            "k_proj": nn.Linear(width, key_width),
            "v_proj": nn.Linear(width, key_width),
            "o_proj": nn.Linear(width, width, bias=False),
        }
        self.self_attn = nn.ModuleDict(projections)
        self.post_attention_layernorm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.mlp = MLP(width, config["intermediate_size"], bias=False)

    def project(self, name, x) -> Tensor:
        """(n, L, E) -> (n, heads, L, D)"""
        return self.self_attn[name](x).unflatten(-1, (-1, self.D)).transpose(1, 2)

    def forward(self, x, angles, mask, past):
        normed = self.input_layernorm(x)
        q = rotate(self.project("q_proj", normed), angles)
        k = rotate(self.project("k_proj", normed), angles)
        v = self.project("v_proj", normed)
        if past is not None:  # prompt cache: one row for all n completions
            past_k, past_v = past
            k = torch.cat([past_k.expand(len(x), -1, -1, -1), k], 2)
            v = torch.cat([past_v.expand(len(x), -1, -1, -1), v], 2)
        # query heads share key and value heads (arXiv 2305.13245)
        shared_k = k.repeat_interleave(self.queries_per_key, 1)
        shared_v = v.repeat_interleave(self.queries_per_key, 1)
        out = F.scaled_dot_product_attention(q, shared_k, shared_v, mask)  # (n, H, L, D)
        out = out.transpose(1, 2).flatten(2)  # (n, L, E)
        x = x + self.self_attn["o_proj"](out)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x, (k, v)


class QwenVL(nn.Module):
    def __init__(self, config):
        super().__init__()
        # `load` adds tokenizer, pixels (bounds of image areas), template (for questions) and files
        self.config = config
        self.updates = 0  # optimizer steps
        width = config["hidden_size"]
        layers = [Layer(config) for _ in range(config["num_hidden_layers"])]
        self.visual = Vision(config["vision_config"])
        modules = {
            "layers": nn.ModuleList(layers),
            "embed_tokens": nn.Embedding(config["vocab_size"], width),
            "norm": nn.RMSNorm(width, config["rms_norm_eps"]),
        }
        self.model = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)

    def forward(self, ids, positions, cache=None, images=()):
        """Return the hidden states of ids (n, L) at positions (3, L), and the new KV cache.

        `cache`: keys and values of earlier tokens. With images, the batch size n must be 1.
        """
        x = self.model["embed_tokens"](ids)  # (n, L, E)
        if images:
            tokens = torch.cat([self.visual(*image) for image in images])
            is_image = (ids == self.config["image_token_id"])[..., None]
            x = x.masked_scatter(is_image, tokens.to(x.dtype))  # image tokens replace <|image_pad|>
        # M-RoPE sections [4, 6, 6]: 4 rotary frequencies for time, 6 for rows, 6 for columns
        sections = torch.tensor(self.config["rope_scaling"]["mrope_section"], device=x.device)
        axis = torch.arange(3, device=x.device).repeat_interleave(sections)  # (D/2,)
        steps = frequencies(len(axis), self.config["rope_theta"], x.device)
        angles = positions[axis].T * steps  # (L, D/2)
        # causal mask: for 2 cached and 2 new tokens, the rows are 1110 and 1111
        before = cache[0][0].shape[2] if cache else 0  # keys: (n, heads, L, D)
        L = ids.shape[1]
        mask = torch.ones(L, before + L, dtype=torch.bool, device=x.device).tril(before)

        new_cache = []
        for i, layer in enumerate(self.model["layers"]):
            past = cache[i] if cache else None
            x, keys_and_values = recompute_in_backward(layer, x, angles, mask, past)
            new_cache.append(keys_and_values)
        return self.model["norm"](x), new_cache


# ---- Prompt -> completions (G, T) and log-probabilities (G, T)

# cuDNN attention with a mask gives NaN gradients on H100, H200 and B200 (pytorch issue 196678).
# In sampling, cuDNN also plans its kernel anew for each token, as the number of keys grows.
torch.backends.cuda.enable_cudnn_sdp(False)


def in_bfloat16(prompt):
    """On a GPU, compute matrix products in bfloat16, and log_softmax in float32.

    Weights stay float32: in bfloat16 (8 significant bits), most updates would round to 0.
    """
    return torch.autocast("cuda", torch.bfloat16, enabled=prompt.ids.is_cuda)


@torch.no_grad()
def sample(model, prompt, G, max_new_tokens) -> tuple[Tensor, Tensor]:
    """Sample G completions of a prompt; return ids and mask, both (G, T).

    The mask is True up to and including the first end token.
    """
    ends = [model.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    ends = torch.tensor(ends, device=prompt.ids.device)
    goes_on = torch.ones(G, dtype=torch.bool, device=ends.device)
    ids = []
    mask = []
    with in_bfloat16(prompt):
        states, cache = model(prompt.ids[None], prompt.positions, images=prompt.images)
        states = states.expand(G, -1, -1)  # one prompt pass for all completions
        for t in range(max_new_tokens):
            logits = model.lm_head(states[:, -1])  # (G, V)
            probabilities = logits.float().softmax(-1)
            require_finite(model, probabilities, "probabilities")
            token = torch.multinomial(probabilities, 1)  # (G, 1), at temperature 1
            ids.append(token)
            mask.append(goes_on)
            goes_on = goes_on & (token != ends).all(1)
            if not goes_on.any():
                break
            position = prompt.positions.max() + 1 + t
            states, cache = model(token, position.expand(3, 1), cache)
    return torch.cat(ids, 1), torch.stack(mask, 1)


def log_probabilities(model, prompt, completions) -> Tensor:
    """Return the log-probabilities of completion tokens, given the tokens before them: (G, T).

    One forward pass of the prompt is enough, as prompt tokens do not attend to completions.
    Gradients reach the prompt through its keys and values. Padding after a completion needs no
    mask: earlier tokens do not attend to it, and losses leave it out.
    """
    G, T = completions.shape
    with in_bfloat16(prompt):
        states, cache = model(prompt.ids[None], prompt.positions, images=prompt.images)
        begin = prompt.positions.max() + 1  # position of the first completion token
        positions = begin + torch.arange(T, device=completions.device)
        after, _ = model(completions, positions.expand(3, T), cache)
        # the last prompt token predicts the first completion token
        last = states[:, -1:].expand(G, -1, -1)
        states = torch.cat([last, after[:, :-1]], 1)  # (G, T, E)
        logits = model.lm_head(states)  # (G, T, V)
        logps = logits.log_softmax(-1)
    return logps.gather(-1, completions[..., None]).squeeze(-1)


def decode(model, completions, mask) -> list[str]:
    """Return completion texts without end tokens."""
    texts = []
    for row, kept in zip(completions, mask, strict=True):
        text = model.tokenizer.decode(row[kept].tolist(), skip_special_tokens=False)
        texts.append(text.removesuffix("<|im_end|>").removesuffix("<|endoftext|>"))
    return texts


def tokenize_answers(model, texts) -> tuple[Tensor, Tensor]:
    """Tokenize and pad G answers; return ids and mask, both (G, T)."""
    device = model.lm_head.weight.device
    end = model.tokenizer.token_to_id("<|im_end|>")  # end token: the model learns when to stop
    answers = [[*to_ids(model.tokenizer, text), end] for text in texts]
    ids = [torch.tensor(answer, device=device) for answer in answers]
    mask = [torch.ones_like(answer, dtype=torch.bool) for answer in ids]
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)


# ---- Completions -> rewards and advantages (G,); log-probabilities (G, T) -> loss

# The model, also called policy, writes a completion o with the probability pi(o). The gradient of
# the expected reward is the mean of reward * grad log pi(o) over sampled completions (proof:
# docs/policy_gradients.md). Subtracting a number from all rewards does not change this gradient on
# average, because grad log pi(o) has the mean 0. Subtracting the mean reward of the group makes it
# far less noisy. So GRPO is SFT on sampled completions, weighted by advantages A: reward minus
# group mean, in standard deviations. Equal rewards teach nothing: A is 0.

# questions must ask for these tags: a model that writes none has reward 0
ANSWER = re.compile(r"<think>.+?</think>\s*<answer>(.+?)</answer>", re.DOTALL)


def plain(solution) -> str:
    """Normalize an answer or a solution for comparison: case, whitespace, final periods and tags.

    "Green  square.", "green square" and "<answer> green square </answer>" are equal, as are the
    number 2.0 and "2". If a text has several <answer> tags, the last one counts.
    """
    if isinstance(solution, float):
        solution = np.format_float_positional(solution, trim="-")  # 2.0 -> "2", 1e-5 -> "0.00001"
    text = str(solution)
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    text = " ".join(text.split())
    text = unicodedata.normalize("NFC", text)  # letter and accent: one character
    return text.rstrip(". ").casefold()


def reward(text, solution) -> float:
    """Return 0.5 for <think>...</think><answer>...</answer>, and 1.5 if the answer is right."""
    match = ANSWER.fullmatch(text.strip())
    if match is None or text.count("<answer>") > 1:  # one answer, no second guess
        return 0.0
    if plain(match[1]) == plain(solution):
        return 1.5
    return 0.5


def group_advantages(rewards, num_generations) -> Tensor:
    """Return (reward - mean) / standard deviation, by group (arXiv 2402.03300, section 4.1.2).

    The rewards (n,) belong to n / num_generations groups. A group with rewards 1, 1, 0, 0 has the
    standard deviation 0.58 (with n - 1) and the advantages 0.87, 0.87, -0.87, -0.87. Adding 1e-4
    to the standard deviation avoids 0 / 0 for equal rewards.
    """
    groups = rewards.view(-1, num_generations)
    # Subtract the maximum: equal rewards must give advantages of exactly 0. A rounded mean of
    # rewards 0.1 gives advantages near 1e-4, and AdamW makes full steps even from tiny gradients.
    groups = groups - groups.amax(1, keepdim=True)
    centered = groups - groups.mean(1, keepdim=True)
    advantages = centered / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.flatten()


def grpo_loss(
    per_token_logps,
    advantages,
    mask,
    *,
    epsilon_low=0.2,
    epsilon_high=0.2,
    beta=0.0,
    old_per_token_logps=None,
    ref_per_token_logps=None,
) -> Tensor:
    """Compute GRPO's loss -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta KL.

    A is the advantage. r is pi / pi_old, where pi_old is the policy that sampled. The KL keeps pi
    near pi_ref, the policy before training. The loss is averaged over tokens, then completions
    (arXiv 2402.03300, eq. 3 and 4), in TRL and the package over all tokens (docs/papers/dapo.md).

    Clipping stops a token's gradient when r > 1 + epsilon_high and A > 0, or r < 1 - epsilon_low
    and A < 0: the policy has moved far enough. As minimal.py updates once per sample, r is 1:
    nothing is clipped, and the loss is about 0, as advantages of a group add up to 0. But r has
    the gradient grad log pi, which makes completions with A > 0 more likely.
    """
    if old_per_token_logps is None:
        old_per_token_logps = per_token_logps.detach()
    advantages = advantages[:, None]  # (G, 1): one for all tokens of a completion
    log_ratio = (per_token_logps - old_per_token_logps) * mask  # at padding, exp could overflow
    ratio = log_ratio.exp()  # (G, T)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if beta:
        # The simplest estimate of KL(pi || pi_ref), log(pi/pi_ref), has the gradient grad log pi,
        # which is 0 on average and cannot keep pi near pi_ref. The estimate k3 = pi_ref/pi -
        # log(pi_ref/pi) - 1 is also right on average (John Schulman, "Approximating KL
        # divergence"). Times r, it has the gradient of KL(pi || pi_ref) (arXiv 2512.02556).
        log_ref_ratio = (ref_per_token_logps - per_token_logps) * mask
        loss = loss + beta * ratio * (log_ref_ratio.expm1() - log_ref_ratio)
    lengths = mask.sum(1).clamp(min=1)  # no 0 / 0 for completions without tokens
    per_completion = (loss * mask).sum(1) / lengths  # (G,)
    return per_completion.mean()


def dpo_loss(per_token_logps, mask, *, beta=0.1, ref_per_token_logps) -> Tensor:
    """Compute the DPO loss (arXiv 2305.18290, eq. 7) for pairs of chosen and rejected answers.

    Log-probabilities are (..., 2, T), for any number of pairs. The loss is small if
    log(pi / pi_ref) is larger for the chosen answer than for the rejected one. A larger beta keeps
    the model nearer to the reference.
    """
    log_ratios = (per_token_logps - ref_per_token_logps) * mask
    chosen, rejected = log_ratios.sum(-1).unbind(-1)  # log pi / pi_ref of whole answers
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def sft_loss(per_token_logps, mask, *, num_tokens=None) -> Tensor:
    """Return minus the sum of log-probabilities, divided by num_tokens, the tokens in a step."""
    if num_tokens is None:
        num_tokens = mask.sum()
    return -(per_token_logps * mask).sum() / num_tokens


# ---- Rows -> losses. The generators `grpo`, `dpo` and `sft` yield a loss and a metric per row, and
# `train` calls backward, which frees activations, before the next. `grpo` samples all groups first,
# as DAPO needs all rewards. `read_options` returns options; options.reward(text, solution): a float


def grpo(model, reference, rows, options):
    """Sample G completions of each prompt, and reinforce those that are better than their group."""
    groups = []
    for row in rows:
        prompt = make_prompt(model, row)
        completions, mask = sample(model, prompt, options.num_generations, options.max_new_tokens)
        texts = decode(model, completions, mask)
        rewards = torch.tensor([options.reward(text, row["solution"]) for text in texts])  # (G,)
        groups.append((prompt, completions, mask, rewards))
    for prompt, completions, mask, rewards in groups:
        ref_logps = None
        if options.beta:
            with torch.no_grad():
                ref_logps = log_probabilities(reference, prompt, completions)
        logps = log_probabilities(model, prompt, completions)  # (G, T)
        old_logps = logps.detach()  # the samples are used for one update
        advantages = group_advantages(rewards, options.num_generations).to(mask.device)
        loss = grpo_loss(
            logps,
            advantages,  # (G,)
            mask,
            old_per_token_logps=old_logps,
            beta=options.beta,
            ref_per_token_logps=ref_logps,
        )
        yield loss / len(groups), rewards


def dpo(model, reference, rows, options):
    """Make the policy prefer chosen answers more strongly than the reference does."""
    for row in rows:
        prompt = make_prompt(model, row)
        answers, mask = tokenize_answers(model, [row["chosen"], row["rejected"]])
        with torch.no_grad():
            ref_logps = log_probabilities(reference, prompt, answers)
        logps = log_probabilities(model, prompt, answers)  # (2, T)
        loss = dpo_loss(logps, mask, beta=options.beta, ref_per_token_logps=ref_logps)
        metric = loss.detach()
        yield loss / len(rows), metric


def sft(model, reference, rows, options):
    """Raise the probability of demonstrated answers."""
    answers = [tokenize_answers(model, [row["completion"]]) for row in rows]
    num_tokens = sum(mask.sum() for _, mask in answers)
    for row, (ids, mask) in zip(rows, answers, strict=True):
        logps = log_probabilities(model, make_prompt(model, row), ids)  # (1, T)
        loss = sft_loss(logps, mask, num_tokens=num_tokens)
        metric = loss.detach() * len(rows)  # the mean over rows is the step's loss
        yield loss, metric


# ---- Losses -> optimizer steps


def make_reference(model) -> QwenVL:
    """Return a frozen copy; on a GPU in bfloat16, to which autocast converts matrices anyway."""
    reference = copy.deepcopy(model).requires_grad_(False)
    for module in reference.modules():
        if isinstance(module, nn.Linear) and module.weight.is_cuda:
            module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)
    return reference


def endless(rows):
    """Yield all rows in random order, again and again."""
    while True:
        yield from random.sample(rows, len(rows))


def train(model, rows, stage, options):
    """Run optimizer steps; a step adds up the gradients of its rows, one after the other."""
    reference = None
    if options.beta and stage is not sft:
        reference = make_reference(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(0.9, 0.99),
        weight_decay=0.0,
        fused=True,  # needs no temporary tensors as large as the model
    )
    stream = endless(rows)
    for step in range(options.max_steps):
        batch = [next(stream) for _ in range(options.prompts_per_step)]
        metrics = []
        for loss, metric in stage(model, reference, batch, options):
            loss.backward()
            metrics.append(metric)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        require_finite(model, norm, "gradients")
        # learning rate: rises during the warmup, then falls to a tenth of its maximum
        rise = (step + 1) / max(1, options.warmup_steps)
        left = (options.max_steps - step) / max(1, options.max_steps - options.warmup_steps)
        factor = min(rise, 0.1 + 0.9 * left)
        optimizer.param_groups[0]["lr"] = options.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        model.updates += 1
        report(stage, step + 1, options.max_steps, metrics)


# ==== You have read it all, from an image to an optimizer step. The rest of the file prints
# metrics, reads and writes files, makes the built-in task, and parses the command line.


def report(stage, step, max_steps, metrics):
    """Print the mean metric of a step: reward for GRPO, loss for SFT and DPO."""
    values = torch.stack(metrics)  # rewards (rows, G) or losses (rows,)
    text = f"{stage.__name__} step {step} of {max_steps}: {values.mean():.3f}"
    if stage is grpo and (values == values[:, :1]).all():
        text += ", equal rewards of a prompt teach nothing; if they stay 0, run --sft first"
    print(text, flush=True)


# ---- Hugging Face folder -> model with tokenizer, and back

# files to save beside trained weights
KEPT = ["config.json", "generation_config.json", "*processor_config.json", "chat_template.*"]
KEPT += ["tokenizer*.json", "*_tokens*.json", "vocab.json", "merges.txt"]
# transformers leaves these defaults out of a saved vision_config
VISION_DEFAULTS = {
    "depth": 32,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
# supported settings: with other values, minimal.py would compute a wrong model
ONLY = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "do_resize": True,
    "resample": 3,  # Image.Resampling.BICUBIC
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class InputError(ValueError):
    """A file, row or option that minimal.py cannot use; its message is printed alone."""


def require(condition, message):
    if not condition:
        raise InputError(message)


def require_finite(model, values, name):
    message = f"{name} are not finite after {model.updates} optimizer steps; "
    require(values.isfinite().all(), message + "try a lower --learning_rate")


def read_json(file):
    return json.loads(Path(file).read_text("utf-8"))


def write_json(file, values):
    Path(file).write_text(json.dumps(values, indent=2), "utf-8")


def read_config(folder) -> dict:
    """Read config.json; transformers 5 writes language model options into text_config."""
    config = read_json(Path(folder, "config.json"))
    is_qwen = config.get("model_type") == "qwen2_5_vl"
    require(is_qwen, f"{folder} is not a Qwen2.5-VL folder; train.py reads other families")
    known = {key: value for key, value in config.items() if value is not None}
    config = {**config.get("text_config", {}), **known}
    vision = {**VISION_DEFAULTS, **config["vision_config"]}
    rope = config.get("rope_parameters") or config["rope_scaling"]
    kind = rope.get("rope_type", rope.get("type"))
    require(kind in ("default", "mrope"), f"{folder}: minimal.py cannot compute the rope {kind!r}")
    return {**config, **rope, "rope_scaling": rope, "vision_config": vision}  # with rope_theta


def read_files(folder) -> dict[str, bytes]:
    """Read config and tokenizer files; refuse links out of the folder, except to Hub caches."""
    files = {}
    for pattern in KEPT:
        for file in folder.glob(pattern):
            target = file.resolve()
            is_own = target.parent == folder.resolve() or target.parent.name == "blobs"
            require(is_own, f"{file} is a link to {target}; replace it with a copy of the file")
            files[file.name] = content = file.read_bytes()
            # a chat template, in any file, must be Qwen2.5-VL's: `render` supports no other
            if file.name.startswith("chat_template") or b'"chat_template": "' in content:
                message = f"{file}: train.py reads other chat templates than Qwen2.5-VL's"
                require(b"You are a helpful assistant." in content, message)
    return files


def read_images(folder, files, max_pixels) -> dict:
    """Return image processor settings; max_pixels (None = keep) replaces the largest image area."""
    name = "processor_config.json"  # written by transformers 5
    content = json.loads(files.get(name, "{}"))
    images = content.get("image_processor")
    if images is None:
        name = "preprocessor_config.json"
        content = images = read_json(folder / name)
    low = images.get("min_pixels") or images["size"]["shortest_edge"]
    high = max_pixels or images.get("max_pixels") or images["size"]["longest_edge"]
    require(low <= high, f"{folder / name}: an image has {low} or more pixels, but at most {high}")
    size = {"shortest_edge": low, "longest_edge": high}
    images.update(min_pixels=low, max_pixels=high, size=size)
    files[name] = json.dumps(content, indent=2).encode()  # `save` writes the new pixel limits
    return images


def read_weights(folder, device, dtype) -> dict[str, Tensor]:
    """Read weights from one file, or from the files in the index."""
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        index = read_json(folder / "model.safetensors.index.json")
        names = sorted(set(index["weight_map"].values()))
    weights = {}
    for file in names:
        for name, weight in load_file(folder / file, str(device)).items():
            # transformers' module names -> names in files on the Hub
            name = name.replace("model.visual.", "visual.").replace("language_model.", "")
            weights[name] = weight.to(dtype)
    return weights


def load(folder, device="cpu", dtype=torch.float32, max_pixels=None) -> QwenVL:
    """Load a model from a Hugging Face folder; max_pixels replaces the folder's image limit."""
    folder = Path(folder)
    config = read_config(folder)
    files = read_files(folder)
    images = read_images(folder, files, max_pixels)
    for settings in (config, config["vision_config"], images):
        for key, only in ONLY.items():
            message = f"{folder}: {key} is {settings.get(key)!r}, but minimal.py computes {only!r}"
            require(settings.get(key) in (None, only), message)
    # in rows, control tokens are plain text; other added tokens, such as <|box_start|>, stay tokens
    control = ("<|im", "<|vision", "<|video", "<|endoftext")
    content = read_json(folder / "tokenizer.json")
    for token in content["added_tokens"]:
        token["special"] = token["content"].startswith(control)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    has_image = tokenizer.token_to_id("<|image_pad|>") == config["image_token_id"]
    require(has_image, f"{folder}: image_token_id in config.json is not the id of <|image_pad|>")
    with torch.device("meta"):  # no memory for weights yet
        model = QwenVL(config)
    model.tokenizer = tokenizer
    model.files = files
    model.pixels = images["min_pixels"], images["max_pixels"]
    model.template = "{problem}"
    weights = read_weights(folder, device, dtype)
    is_tied = config["tie_word_embeddings"]  # lm_head and embed_tokens share weights
    if is_tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if is_tied:  # tie again: assign=True created two parameters
        model.lm_head.weight = model.model["embed_tokens"].weight
    return model


def save(model, folder):
    """Save a model, in its own dtype, as a folder for transformers, vLLM and train.py."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict()
    if model.config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    new = folder / "model.safetensors.new"  # keep an earlier model until this file is complete
    try:
        save_file(weights, new, {"format": "pt"})
        new.replace(folder / "model.safetensors")
    finally:
        new.unlink(missing_ok=True)
    for name, content in model.files.items():
        (folder / name).write_bytes(content)
    config = json.loads(model.files["config.json"])
    config.pop("dtype", None)  # transformers 5 writes dtype, but also reads torch_dtype
    config["torch_dtype"] = str(model.lm_head.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    # settings for train.py and `minivlmrl evaluate`; JSON is valid YAML
    low, high = model.pixels
    prompt = {"prompt_template": model.template, "min_pixels": low, "max_pixels": high}
    write_json(folder / "minivlmrl.yaml", {"data": {**prompt, "answer_format": "tags"}})


# ---- File of rows -> rows

ANSWERS = {grpo: ["solution"], sft: ["completion"], dpo: ["chosen", "rejected"]}
# formats with which Pillow runs other programs or opens other files, as in the package
PROGRAMS = ("EPS", "IPTC", "WMF")
# unsupported fields that change the prompt
REFUSED = ("system", "video", "videos", "tools", "min_pixels", "max_pixels", "messages", "prompt")
# sentence after each question, as in recipes/own_data.yaml
ASK = " First think about it between <think> and </think>, then give the answer alone "
ASK += "between <answer> and </answer>."


@contextlib.contextmanager
def open_image(file):
    """Open an image, or its file, for a `with` block; errors in the block name the file."""
    try:
        image = file
        if not isinstance(file, Image.Image):
            require(Path(file).is_file(), "no such file")  # a pipe would never end
            image = Image.open(file)
            image.filename = ""  # else Pillow 13 swaps the sides of some rotated TIFF images
        with image:
            require(image.format not in PROGRAMS, f"{image.format} can run programs; save it as PNG")
            # 16 or 32 bits: Pillow would make nearly all pixels white or black
            require(image.mode[0] not in "IF", "save the image with 8 bits per color")
            short, long = sorted(image.size)
            require(long <= 200 * short, "it is more than 200 times as long as wide")
            yield image
    except Exception as error:  # Pillow raises many kinds, such as struct.error
        raise InputError(f"{file!s:.200} cannot be read as an image: {error}") from error


def read_row(line, answers, folder) -> dict:
    """Read and check a JSON row, and its image headers."""
    row = json.loads(line)
    require(isinstance(row, dict), f"a row is an object {{...}}, but this is {row!r:.80}")
    json.dumps(row, ensure_ascii=False).encode()  # fails for half a surrogate pair
    row = {field: value for field, value in row.items() if value is not None}
    for field in REFUSED:
        require(not row.get(field), f"minimal.py does not read {field!r}; train.py reads such rows")
    for field in ("problem", *answers):
        value = row.get(field)
        if field == "solution":
            is_text = isinstance(value, str | int | float) and plain(value)
        else:
            is_text = isinstance(value, str) and (value.strip() or field == "problem")
        require(is_text, f"{field!r} must be a text with letters or digits in {row!r}")
    has_one = ("image" in row) != ("images" in row)
    require(has_one, f"the row has {[*row]}, but it needs either 'image' or 'images'")
    names = row.get("images", [row.get("image")])
    row["images"] = [Path(folder, name) for name in names]
    for path in row["images"]:
        with open_image(path):  # read only the header
            pass
    places = row["problem"].count("<image>")
    require(places in (0, len(names)), f"'problem' has {places} <image> for {len(names)} images")
    return row


def read_rows(file, answers) -> tuple[list[dict], str]:
    """Read rows from JSON Lines, with image paths relative to it; return them and their template.

    For GRPO, or if all answers have tags, questions ask for tags.
    """
    rows = []
    for number, line in enumerate(Path(file).read_bytes().splitlines(), 1):
        try:
            if line.strip():
                rows.append(read_row(line, answers, Path(file).parent))
        except (OSError, RecursionError, TypeError, ValueError) as error:
            raise InputError(f"{file}, line {number}: {error}"[:400]) from error
    require(rows, f"{file} has no rows")
    has_tags = answers == ["solution"] or all("<answer>" in row[answers[0]] for row in rows)
    is_asked = all("<answer>" in row["problem"] for row in rows)
    ask = ASK if has_tags and not is_asked else ""
    for row in rows:
        row["problem"] += ask
    return rows, "{problem}" + ask


# ---- Built-in task: name the object in a small image (12 answers)

COLORS = {
    "red": (220, 50, 47),
    "green": (60, 160, 60),
    "blue": (50, 90, 210),
    "yellow": (225, 190, 20),
    "purple": (140, 60, 170),
    "black": (35, 35, 35),
}
LABELS = [f"{color} {shape}" for color in COLORS for shape in ("square", "triangle")]
# control tokens of Qwen2.5-VL, without their "<|" and "|>"
CONTROL = ["endoftext", "im_start", "im_end"]
for name in ("object_ref", "box", "quad", "vision"):
    CONTROL += [f"{name}_start", f"{name}_end"]
CONTROL += ["vision_pad", "image_pad", "video_pad"]
DECODER = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 20.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": 7,
    "window_size": 28,
    "fullatt_block_indexes": [1],
}
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 7,
    "merge_size": 2,
    "min_pixels": 196,
    "max_pixels": 12845056,
}


def tagged(label) -> str:
    color = label.split()[0]
    return f"<think>I see {color}</think><answer>{label}</answer>"


def draw_object(color, shape) -> Image.Image:
    """Draw a square or triangle at a random place on a light background."""
    background = tuple(random.choices(range(200, 256), k=3))
    image = Image.new("RGB", (56, 56), background)
    side = random.randint(32, 52)
    left = random.randint(0, 56 - side)
    top = random.randint(0, 56 - side)
    right = left + side - 1
    bottom = top + side - 1
    upper = [(right, top), (left, top)]
    if shape == "triangle":
        upper = [((left + right) / 2, top)]
    corners = [(left, bottom), (right, bottom), *upper]
    ImageDraw.Draw(image).polygon(corners, COLORS[color])
    return image


def draw_row(wrong=0.0) -> dict:
    """Draw a random object; with probability `wrong`, its completion names a random label."""
    label = random.choice(LABELS)
    other = random.choice([name for name in LABELS if name != label])
    image = draw_object(*label.split())
    right = tagged(label)
    completion = tagged(random.choice(LABELS)) if random.random() < wrong else right
    # rejected: wrong in <think> and <answer>, wrong only in <answer>, or with 1 to 4 characters missing
    cut = random.randrange(1, len(right))
    damaged = right[:cut] + right[cut + 4 :]
    rejected = random.choice([tagged(other), right.replace(label, other), damaged])
    return {
        "images": [image],
        "problem": "What is it?",
        "solution": label,
        "completion": completion,
        "chosen": right,
        "rejected": rejected,
    }


def make_tokenizer() -> Tokenizer:
    """Train a small tokenizer on texts of the built-in task."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["system\nYou are a helpful assistant.", "user\nWhat is it?", *map(tagged, LABELS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([f"<|{name}|>" for name in CONTROL])
    return tokenizer


def make_folder(folder):
    """Write a Hugging Face folder: 0.74 million random weights, a small tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**DECODER, "vision_config": TOWER, "vocab_size": tokenizer.get_vocab_size()}
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        key = name.removesuffix("_pad") + "_token_id"
        config[key] = tokenizer.token_to_id(f"<|{name}|>")
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", IMAGES)
    # end and padding tokens for transformers
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    ends = [tokenizer.token_to_id(name) for name in names.values()]
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", **names})
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    model = QwenVL(read_config(folder))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            std = 0.02 if "embed_tokens" in name else weight[0].numel() ** -0.5
            nn.init.normal_(weight, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})


def accuracy(model, rows) -> float:
    """Sample two completions per row; return the share of right answers."""
    right = []
    for row in rows:
        completions, mask = sample(model, make_prompt(model, row), 2, 20)
        right += [reward(text, row["solution"]) > 1 for text in decode(model, completions, mask)]
    return sum(right) / len(right)


def train_tiny(model, options):
    """Teach the answer's form with 96 demonstrations, half with random labels; then run a stage."""
    held_out = [draw_row() for _ in range(128)]
    demonstrations = [draw_row(wrong=0.5) for _ in range(96)]
    first = {"max_steps": 40, "prompts_per_step": 32, "learning_rate": 3e-3, "warmup_steps": 10}
    train(model, demonstrations, sft, argparse.Namespace(**first, beta=0.0))
    print(f"accuracy after SFT {accuracy(model, held_out):.3f}")
    rows = [draw_row() for _ in range(2560)]
    train(model, rows, options.stage, options)
    print(f"accuracy after {options.stage.__name__} {accuracy(model, held_out):.3f}")


# ---- Command line

# smallest values
LEAST = {"max_steps": 1, "prompts_per_step": 1, "max_new_tokens": 1, "max_pixels": 1}
LEAST |= {"learning_rate": 0, "warmup_steps": 0, "beta": 0}


def read_options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("folder", nargs="?", help="Hugging Face folder (default: a tiny model)")
    add("rows", nargs="?", help="JSON Lines file")
    add("--sft", action="store_const", dest="stage", const=sft, default=grpo)
    add("--dpo", action="store_const", dest="stage", const=dpo)
    add("--max_steps", "--steps", type=int, default=300, help="optimizer steps")
    add("--prompts_per_step", "--rows_per_step", type=int, default=16, help="rows of a step")
    add("--learning_rate", type=float, default=1e-6)
    add("--warmup_steps", type=int, default=10, help="steps of rising learning rate")
    add("--num_generations", "--group", type=int, default=8, help="completions of a prompt, G")
    add("--beta", type=float, default=0.0, help="weight of the KL, or DPO's beta")
    add("--max_new_tokens", type=int, default=256)
    add("--max_pixels", type=int, default=401408, help="largest area of an image")
    add("--seed", type=int, default=0)
    add("--output_dir", default="runs/minimal", help="folder for the trained model")
    options = parser.parse_args()
    if not options.folder:  # defaults for the tiny model, which starts random
        parser.set_defaults(max_steps=160, learning_rate=3e-4, warmup_steps=5)
        parser.set_defaults(max_new_tokens=20, beta=0.02)
    if options.stage is dpo:
        # tiny model: with 0.1, well-formed answers become rare (docs/results.md)
        parser.set_defaults(beta=0.1 if options.folder else 1.0)
    options = parser.parse_args(namespace=argparse.Namespace(reward=reward))
    if options.folder and not options.rows:
        parser.error("name a file of rows after the folder")
    for name, least in LEAST.items():
        if not getattr(options, name) >= least:  # NaN is refused as well
            parser.error(f"--{name} must be at least {least}")
    if options.stage is grpo and options.num_generations < 2:
        parser.error("--num_generations must be at least 2: the rewards of a group are compared")
    if options.stage is dpo and options.beta <= 0:
        parser.error("--dpo needs a --beta above 0: with 0, the loss is the same for all models")
    earlier = Path(options.output_dir, "config.json").resolve()
    if earlier.exists() and (
        earlier == Path(options.folder or "", "config.json").resolve()
        or read_json(earlier).get("hidden_size") != DECODER["hidden_size"]
    ):
        parser.error(f"{options.output_dir} has a model; move it, or choose another --output_dir")
    return options


def check_space(model, folder):
    """Raise InputError if GPU memory is too small for training, or the disk for saving."""
    size = sum(weight.nbytes for weight in model.parameters()) / 1e9
    if model.lm_head.weight.is_cuda:  # weights, gradients and AdamW's two states
        gpu = torch.cuda.mem_get_info()[1] / 1e9
        message = f"training needs over {4 * size:.0f} GB of {gpu:.0f} GB; use LoRA, as in "
        require(4 * size < gpu, message + "recipes/own_data_one_card.yaml, with train.py")
    free = shutil.disk_usage(folder).free / 1e9
    require(size < free, f"{folder} has {free:.3f} GB free, but the model needs {size:.3f} GB")


def save_last(model, options):
    """Save to --output_dir or, if that fails, to a temporary folder; print what to run next."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    folder = options.output_dir
    try:
        save(model, folder)
    except (OSError, SafetensorError) as error:
        print(f"minimal.py: {folder} cannot be saved: {error}", file=sys.stderr)
        folder = tempfile.mkdtemp(prefix="minimal-")
        save(model, folder)
    print(f"saved {folder}")
    if options.folder:
        command = "evaluate" if options.stage is grpo else "generate"
        files = shlex.join(["--model", folder, "--data", options.rows])
        print(f"next, in a clone of minivlmrl: python -m minivlmrl {command} {files}")


def main():
    options = read_options()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    # before the first step: fail if the folder cannot be written
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=options.output_dir).close()
    if options.folder:
        rows, template = read_rows(options.rows, ANSWERS[options.stage])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load(options.folder, device, max_pixels=options.max_pixels)
        model.template = template
    else:
        torch.set_num_threads(1)  # tensors are too small for several threads
        make_folder(f"{options.output_dir}/random")
        model = load(f"{options.output_dir}/random")
    check_space(model, options.output_dir)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clusters end runs with SIGTERM
    try:
        if options.folder:
            train(model, rows, options.stage, options)
        else:
            train_tiny(model, options)
    except KeyboardInterrupt:
        sys.exit("stopped with Ctrl-C or SIGTERM")
    finally:  # keep finished steps after an error
        if model.updates:
            save_last(model, options)


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError, SafetensorError) as error:
        sys.exit(f"minimal.py: {error}")
