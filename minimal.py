"""Reinforcement learning for Qwen2.5-VL in one file, from an image file to an optimizer step.

    python minimal.py                          # a tiny model learns shapes on a CPU
    python minimal.py FOLDER rows.jsonl        # GRPO on your images, with a Hugging Face folder
    python minimal.py FOLDER rows.jsonl --sft  # rows need "completion"; --dpo: "chosen", "rejected"

A row is {"image": "cat.jpg", "problem": "How many cats are there?", "solution": "2"}. minimal.py
adds a sentence to this question, which asks for an answer in the form <think>...</think>
<answer>...</answer>: only this form earns a reward. SFT imitates given answers. GRPO samples
several answers to a question, and makes those with more reward more likely. DPO makes a chosen
answer more likely than a rejected one. Read minimal.py from top to bottom: a line such as
"# ---- A -> B" says that the next part takes A and returns B. The package has what minimal.py
lacks:
- all prompts in one packed sequence, and Triton kernels: minivlmrl/model/packing.py, kernels/
- log-probabilities without storing all logits: kernels/linear_log_softmax.py
- several GPUs: minivlmrl/distributed/fsdp.py
- LoRA and 4-bit weights for small cards: minivlmrl/model/lora.py, minivlmrl/model/nf4.py
- resume, logs, evaluation: minivlmrl/run/
- several updates per rollout, DAPO, GSPO, PPO: minivlmrl/trainers/, minivlmrl/losses/
- videos, conversations, other files of rows: minivlmrl/data/
- Qwen2-VL, Qwen3-VL: minivlmrl/model/families/
- tools: minivlmrl/extras/agents/
"""

import argparse
import copy
import json
import math
import random
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageOps
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

# Letters in shapes: an image has P patches in h rows and w columns, n sequences have L tokens, and
# a prompt has G completions, the longest with T tokens. The decoder has width E and H heads of
# width D, and the vocabulary has V tokens. In the published models, a patch has 1176 values:
# 3 channels x 2 frames x 14 x 14 pixels.

# ---- Image file -> patches (P, 1176), as Qwen2-VL reads them (arXiv 2409.12191, section 2.1)

MEAN = np.float32([0.48145466, 0.4578275, 0.40821073])  # red, green and blue in CLIP's images
STD = np.float32([0.26862954, 0.26130258, 0.27577711])


def load_image(file) -> PIL.Image.Image:
    """Open an image in RGB, apply its EXIF rotation, and replace transparency by white."""
    image = file if isinstance(file, PIL.Image.Image) else PIL.Image.open(file)
    if image.mode[0] in "IF":  # Pillow would make nearly every pixel white or black
        raise ValueError(f"{file}: save the image with 8 bits per colour")
    image = PIL.ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
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
    """Cut an image into patches (P, 3 * 2 * patch * patch), which lie in h rows and w columns.

    An image token has merge x merge neighbouring patches, which are consecutive rows of the result.
    """
    height, width = smart_resize(image.height, image.width, patch * merge, min_pixels, max_pixels)
    image = image.resize((width, height), PIL.Image.Resampling.BICUBIC)
    pixels = (np.asarray(image) / 255).astype(np.float32)  # (height, width, 3), from 0 to 1
    pixels = (pixels - MEAN) / STD
    frames = np.stack([pixels, pixels])  # a patch covers two frames of a video; here both are equal
    h, w = height // patch, width // patch
    # The axes of x are: frame; row of the image token, row of the patch in the token, y in the
    # patch; column of the image token, column of the patch in the token, x in the patch; channel
    x = frames.reshape(2, h // merge, merge, patch, w // merge, merge, patch, 3)
    # The patches of an image token become consecutive, and the values of a patch are ordered by
    # channel, frame, y and x.
    patches = x.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(h * w, -1)
    return torch.from_numpy(patches), h, w


# ---- Row -> prompt: token ids (L,), M-RoPE positions (3, L), and the patches of its images


@dataclass
class Prompt:
    ids: Tensor  # (L,)
    positions: Tensor  # (3, L), the time, row and column of each token
    images: list[tuple[Tensor, int, int]]  # patches (P, 1176), rows and columns of each image


def to_ids(tokenizer, text) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def render(tokenizer, problem, image_lengths) -> list[int]:
    r"""Return the token ids (L,) of a question in the chat template of Qwen2.5-VL.

    Each <image> in the question becomes an image; without <image>, the images come first. An
    image of 3 tokens and "What?" give the ids of this text, which is wrapped here:
        <|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n
        <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>What?<|im_end|>\n
        <|im_start|>assistant\n
    """
    if "<image>" not in problem:
        problem = "<image>" * len(image_lengths) + problem
    first, *texts = problem.split("<image>")
    if len(texts) != len(image_lengths):
        raise ValueError(f"{len(texts)} <image> in {problem!r}, but {len(image_lengths)} images")
    names = "im_start", "im_end", "vision_start", "image_pad", "vision_end"
    # Each variable is a list with one id: `pad * 3` contains the id of <|image_pad|> three times.
    start, end, open_image, pad, close_image = ([tokenizer.token_to_id(f"<|{n}|>")] for n in names)
    pieces = [start, "system\nYou are a helpful assistant.", end, "\n", start, f"user\n{first}"]
    for length, text in zip(image_lengths, texts, strict=True):
        pieces += [open_image, pad * length, close_image, text]
    pieces += [end, "\n", start, "assistant\n"]
    ids = []
    for piece in pieces:
        ids += to_ids(tokenizer, piece) if isinstance(piece, str) else piece
    return ids


def mrope_positions(ids, grids, image_token) -> Tensor:
    """Return each token's position in time, row and column: (3, L) (arXiv 2409.12191, figure 3).

    The text after an image begins at the image's largest position plus 1. Two text tokens, an image
    of 2 x 3 tokens and one more text token have the positions
        time   0 1 | 2 2 2 2 2 2 | 5
        row    0 1 | 2 2 2 3 3 3 | 5
        column 0 1 | 2 3 4 2 3 4 | 5
    """
    pieces = []
    grids = iter(grids)
    position = done = 0
    while done < len(ids):
        rows, columns = next(grids) if ids[done] == image_token else (1, 1)  # text is 1 x 1
        axes = torch.zeros(1).long(), torch.arange(rows), torch.arange(columns)
        pieces.append(position + torch.cartesian_prod(*axes).T)
        position += max(rows, columns)
        done += rows * columns
    return torch.cat(pieces, 1)


def make_prompt(model, row) -> Prompt:
    """Convert the images and the question of a row to the inputs of the model."""
    vision = model.config["vision_config"]
    merge = vision["spatial_merge_size"]
    device = model.lm_head.weight.device
    images = []
    for file in row["images"]:
        patches, h, w = patchify(load_image(file), vision["patch_size"], merge, *model.pixels)
        images.append((patches.to(device), h, w))
    grids = [(h // merge, w // merge) for _, h, w in images]  # rows and columns of tokens
    ids = render(model.tokenizer, row["problem"], [rows * columns for rows, columns in grids])
    positions = mrope_positions(ids, grids, model.config["image_token_id"])
    return Prompt(torch.tensor(ids, device=device), positions.to(device), images)


# ---- What the vision tower and the language model share; modules have the names of the checkpoints


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, width, inner, bias):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias)
        self.up_proj = nn.Linear(width, inner, bias)
        self.down_proj = nn.Linear(inner, width, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def frequencies(count, theta, device) -> Tensor:
    """Return the frequencies of rotary embeddings, from 1 to about 1 / theta: (count,)."""
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32, device=device) / count)


def rotate(x, angles) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) of x (..., L, D) by angles (L, D/2) (arXiv 2104.09864).

    The dot product of a rotated query and key depends only on the difference of their positions.
    """
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# ---- Vision tower: patches of an image (P, 1176) -> its tokens (P / 4, E) (arXiv 2502.13923)


class VisionBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.heads = config["num_heads"]
        self.norm1 = nn.RMSNorm(width, 1e-6)
        qkv, proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn = nn.ModuleDict({"qkv": qkv, "proj": proj})
        self.norm2 = nn.RMSNorm(width, 1e-6)
        self.mlp = MLP(width, config["intermediate_size"], bias=True)

    def forward(self, x, angles, mask):
        qkv = self.attn["qkv"](self.norm1(x))  # (P, 3 * width)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)  # (H, P, D)
        q, k = rotate(q, angles), rotate(k, angles)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0]  # a batch of one
        x = x + self.attn["proj"](out.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config["hidden_size"]
        size = (2, config["patch_size"], config["patch_size"])
        merged = width * config["spatial_merge_size"] ** 2
        # A linear layer for each patch, which checkpoints store as a Conv3d
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, width, size, size, bias=False)})
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config["depth"]))
        mlp = [nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, config["out_hidden_size"])]
        self.merger = nn.ModuleDict({"ln_q": nn.RMSNorm(width, 1e-6), "mlp": nn.Sequential(*mlp)})

    def forward(self, patches, h, w):
        merge = self.config["spatial_merge_size"]
        kernels = self.patch_embed["proj"].weight.flatten(1)  # (width, 1176)
        x = F.linear(patches.to(kernels.dtype), kernels)  # (P, width)
        x = x.to(kernels.dtype)  # autocast gave bfloat16; the sum over blocks must be float32
        # The row and the column of each patch, in the order of the patches: (P, 2)
        places = torch.cartesian_prod(torch.arange(h), torch.arange(w)).to(x.device)
        places = places.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
        places = places.reshape(h * w, 2)
        # Half of a patch's rotary angles come from its row, half from its column: (P, D/2)
        count = self.config["hidden_size"] // self.config["num_heads"] // 4
        angles = (places[..., None] * frequencies(count, 10000.0, x.device)).flatten(1)
        # In most blocks, a patch attends only to patches in the same window of the image.
        side = self.config["window_size"] // self.config["patch_size"]  # in patches
        windows = places // (side // merge * merge)  # a token's patches are in one window
        same_window = (windows[:, None] == windows).all(-1)  # (P, P)
        for i, block in enumerate(self.blocks):
            sees_all = i in self.config["fullatt_block_indexes"]
            x = block(x, angles, None if sees_all else same_window)
        x = self.merger["ln_q"](x).view(h * w // merge**2, -1)  # (P / 4, 4 * width)
        return self.merger["mlp"](x)


# ---- Language model: token ids (n, L) -> states (n, L, E), and the cache of keys and values


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.D = width // config["num_attention_heads"]
        self.queries_per_key = config["num_attention_heads"] // config["num_key_value_heads"]
        self.input_layernorm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.self_attn = nn.ModuleDict()
        self.self_attn["q_proj"] = nn.Linear(width, width)
        self.self_attn["k_proj"] = nn.Linear(width, width // self.queries_per_key)
        self.self_attn["v_proj"] = nn.Linear(width, width // self.queries_per_key)
        self.self_attn["o_proj"] = nn.Linear(width, width, bias=False)
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
        if past is not None:  # a cache of only the prompt has one row, which all n rows share
            k = torch.cat([past[0].expand(len(x), -1, -1, -1), k], 2)
            v = torch.cat([past[1].expand(len(x), -1, -1, -1), v], 2)
        # Several query heads share one head of keys and values (arXiv 2305.13245).
        shared_k = k.repeat_interleave(self.queries_per_key, 1)
        shared_v = v.repeat_interleave(self.queries_per_key, 1)
        out = F.scaled_dot_product_attention(q, shared_k, shared_v, mask)
        x = x + self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x)), (k, v)


class QwenVL(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config["hidden_size"]
        layers = [Layer(config) for _ in range(config["num_hidden_layers"])]
        self.visual = Vision(config["vision_config"])
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.model["embed_tokens"] = nn.Embedding(config["vocab_size"], width)
        self.model["norm"] = nn.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)

    def forward(self, ids, positions, cache=None, images=()):
        """Return the hidden states of ids (n, L) at positions (3, L), and the new KV cache.

        `cache` holds the keys and values of earlier tokens. If there are images, n must be 1.
        """
        x = self.model["embed_tokens"](ids)
        if images:
            tokens = torch.cat([self.visual(*image) for image in images])
            is_image = (ids == self.config["image_token_id"])[..., None]
            x = x.masked_scatter(is_image, tokens.to(x.dtype))
        # With M-RoPE sections [4, 6, 6], the first 4 rotary frequencies turn with a token's
        # position in time, the next 6 with its row, and the last 6 with its column.
        sections = torch.tensor(self.config["mrope_section"], device=x.device)
        axis = torch.arange(3, device=x.device).repeat_interleave(sections)
        theta = self.config["rope_theta"]
        angles = positions[axis].T * frequencies(len(axis), theta, x.device)  # (L, D/2)
        # Example: with 2 cached tokens and 2 new ones, the causal mask has the rows 1110 and 1111.
        before = cache[0][0].shape[2] if cache else 0
        L = ids.shape[1]
        mask = torch.ones(L, before + L, dtype=torch.bool, device=x.device).tril(before)
        new_cache = []
        for i, layer in enumerate(self.model["layers"]):
            x, keys_and_values = layer(x, angles, mask, cache[i] if cache else None)
            new_cache.append(keys_and_values)
        return self.model["norm"](x), new_cache


# ---- Folder in Hugging Face's format -> model with tokenizer, and back

# Values that transformers leaves out of a saved vision_config, because they are its defaults
VISION_DEFAULTS = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16}
VISION_DEFAULTS |= {"out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2}
VISION_DEFAULTS |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
# prefixes of control tokens; if a user writes such a token in a question, it is ordinary text
STRUCTURE = ("<|im", "<|vision", "<|video", "<|endoftext")


def write(file, values):
    Path(file).write_text(json.dumps(values, indent=2))


def read_config(folder) -> dict:
    """Read config.json. transformers 5 writes the language model's options into text_config."""
    config = json.loads(Path(folder, "config.json").read_text())
    if config["model_type"] != "qwen2_5_vl":
        raise ValueError(f"{folder} is not a Qwen2.5-VL folder; train.py reads other families")
    known = {key: value for key, value in config.items() if value is not None}
    config = config.get("text_config", {}) | known
    config["vision_config"] = VISION_DEFAULTS | config["vision_config"]
    rope = config.get("rope_parameters") or config["rope_scaling"]
    config["mrope_section"] = rope["mrope_section"]
    config["rope_theta"] = rope.get("rope_theta") or config["rope_theta"]
    return config


def load(folder, device="cpu", dtype=torch.float32, max_pixels=None) -> QwenVL:
    """Load a model from a Hugging Face folder; max_pixels replaces the folder's image limit."""
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):  # no memory for weights, which the files contain
        model = QwenVL(config)
    weights = {}
    for file in folder.glob("model*.safetensors"):
        for name, weight in load_file(file, str(device)).items():
            name = name.replace("model.visual.", "visual.").replace("language_model.", "")
            weights[name] = weight.to(dtype)
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if config["tie_word_embeddings"]:  # assign=True has made two parameters
        model.lm_head.weight = model.model["embed_tokens"].weight
    if (folder / "preprocessor_config.json").exists():
        settings = json.loads((folder / "preprocessor_config.json").read_text())
    else:  # transformers 5
        settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    size = settings.get("size", {})
    smallest = settings.get("min_pixels") or size["shortest_edge"]
    largest = settings.get("max_pixels") or size["longest_edge"]
    model.pixels = (smallest, max_pixels or largest)
    # If a user writes a control token such as <|im_end|> in a question, it is encoded as ordinary
    # text. Other added tokens, such as <|box_start|>, keep their ids in a question.
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"].startswith(STRUCTURE)
    model.tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
    model.tokenizer.encode_special_tokens = True
    model.folder = folder
    return model


def save(model, folder):
    """Save a model as a folder for transformers, vLLM and train.py. Weights keep their dtype."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.folder.iterdir():  # settings and files of the tokenizer
        if file.suffix in (".json", ".jinja", ".txt") and "index" not in file.name:
            shutil.copy(file, folder)
    weights = model.state_dict()
    if model.config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model.folder / "config.json").read_text())
    config.pop("dtype", None)  # transformers 5 writes dtype, but also reads torch_dtype
    config["torch_dtype"] = str(model.lm_head.weight.dtype).removeprefix("torch.")
    write(folder / "config.json", config)


# ---- Prompt -> completions (G, T), and their log-probabilities (G, T)

# A decorator: on a GPU, products are computed in bfloat16. Weights and norms stay float32, because
# bfloat16 has 8 significant bits and rounds most updates at a learning rate of 1e-6 to nothing.
in_bfloat16 = torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available())


@in_bfloat16
@torch.no_grad()
def sample(model, prompt, G, max_new_tokens) -> tuple[Tensor, Tensor]:
    """Sample G completions of a prompt. Return ids and mask, both (G, T).

    The mask of a completion is True for its tokens up to the first end token, which is included,
    and False for all later tokens.
    """
    ends = [model.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    ends = torch.tensor(ends, device=prompt.ids.device)
    states, cache = model(prompt.ids[None], prompt.positions, images=prompt.images)
    states = states.expand(G, -1, -1)
    goes_on = torch.ones(G, dtype=torch.bool, device=ends.device)
    ids = []
    mask = []
    for t in range(max_new_tokens):
        probabilities = model.lm_head(states[:, -1]).float().softmax(-1)  # (G, V)
        token = torch.multinomial(probabilities, 1)  # (G, 1)
        ids.append(token)
        mask.append(goes_on)
        goes_on = goes_on & (token != ends).all(1)
        if not goes_on.any():
            break
        position = prompt.positions.max() + 1 + t
        states, cache = model(token, position.expand(3, 1), cache)
    return torch.cat(ids, 1), torch.stack(mask, 1)


@in_bfloat16
def log_probabilities(model, prompt, completions) -> Tensor:
    """Return the log-probability of each token in completions (G, T), given the tokens before it.

    All G completions share one forward pass of the prompt. No prompt token attends to a completion.
    """
    G, T = completions.shape
    states, cache = model(prompt.ids[None], prompt.positions, images=prompt.images)
    positions = prompt.positions.max() + 1 + torch.arange(T, device=completions.device)
    after, _ = model(completions, positions.expand(3, T), cache)
    # The last token of the prompt predicts the first token of a completion.
    states = torch.cat([states[:, -1:].expand(G, -1, -1), after[:, :-1]], 1)  # (G, T, E)
    logits = model.lm_head(states)  # (G, T, V)
    return logits.log_softmax(-1).gather(-1, completions[..., None]).squeeze(-1)


def decode(model, completions, mask) -> list[str]:
    """Return the texts of completions, without their end-of-sequence tokens."""
    ids = [row[kept].tolist() for row, kept in zip(completions, mask, strict=True)]
    texts = model.tokenizer.decode_batch(ids, skip_special_tokens=False)
    return [text.removesuffix("<|im_end|>").removesuffix("<|endoftext|>") for text in texts]


def tokenize_answers(model, texts) -> tuple[Tensor, Tensor]:
    """Tokenize G given answers, pad them, and return their ids and mask, both (G, T)."""
    end = model.tokenizer.token_to_id("<|im_end|>")
    device = model.lm_head.weight.device
    ids = [torch.tensor([*to_ids(model.tokenizer, text), end], device=device) for text in texts]
    mask = [torch.ones_like(answer, dtype=torch.bool) for answer in ids]
    return pad_sequence(ids, batch_first=True), pad_sequence(mask, batch_first=True)


# ---- Completions -> rewards and advantages (G,); log-probabilities (G, T) -> loss

# The model is also called the policy, and pi(o) is its probability of a completion o. The gradient
# of the expected reward is the mean of reward * grad log pi(o) over own completions. To subtract
# the mean reward of the group hardly changes this gradient, but makes it far less noisy. So GRPO
# is SFT on the model's own completions, each weighted by its advantage A: how far its reward is
# above the mean of its group, in standard deviations. Equal rewards teach nothing: A is 0.

ANSWER = re.compile(r"<think>.+?</think>\s*<answer>(.+?)</answer>", re.DOTALL)
# The question must ask for this form: a model that never writes it earns 0, and learns nothing.
ASK = " First think about it between <think> and </think>, "
ASK += "then give the answer alone between <answer> and </answer>."


def reward(text, solution) -> float:
    """Return 0.5 for <think>...</think><answer>...</answer>, and 1.5 if the answer is right."""
    match = ANSWER.fullmatch(text.strip())
    if match is None:
        return 0.0
    is_right = match[1].strip().lower() == str(solution).strip().lower()
    return 1.5 if is_right else 0.5


def group_advantages(rewards) -> Tensor:
    """Return (reward - mean) / standard deviation over a group (arXiv 2402.03300, section 4.1.2).

    Rewards 1, 1, 0, 0 have the advantages 0.87, 0.87, -0.87, -0.87. Adding 1e-4 to the standard
    deviation avoids 0 / 0 for equal rewards.
    """
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def grpo_loss(logps, old_logps, advantages, mask, epsilon=0.2, beta=0.0, ref_logps=None) -> Tensor:
    """Compute the loss -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) + beta KL of GRPO.

    A is the advantage, and r is the ratio pi / pi_old of the current policy to the policy that
    sampled the completions. The KL keeps the policy near pi_ref, the policy before training. The
    loss is averaged over the tokens of each completion, and then over completions. Clipping stops
    the gradient of a token when r > 1 + epsilon and A > 0, or r < 1 - epsilon and A < 0. With one
    update per sample, as in minimal.py, the ratio r is 1, and nothing is clipped. GRPO's loss is
    defined in equations 3 and 4 of DeepSeekMath (arXiv 2402.03300).
    """
    ratio = (logps - old_logps).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    if beta:
        # The estimate k3 of KL(pi || pi_ref), pi_ref/pi - log(pi_ref/pi) - 1, is unbiased and
        # never negative (John Schulman, "Approximating KL divergence").
        log_ref_ratio = ref_logps - logps
        loss = loss + beta * (log_ref_ratio.expm1() - log_ref_ratio)
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


def dpo_loss(logps, ref_logps, mask, beta=0.1) -> Tensor:
    """Compute the loss of DPO (arXiv 2305.18290, eq. 7) for a chosen and a rejected answer (2, T).

    log(pi / pi_ref) is large for an answer that the model makes more likely than the reference
    does. The loss is small if the chosen answer has a larger log(pi / pi_ref) than the rejected.
    """
    chosen, rejected = ((logps - ref_logps) * mask).sum(1)  # log pi / pi_ref of the whole answers
    return -F.logsigmoid(beta * (chosen - rejected))


def sft_loss(logps, mask, num_tokens) -> Tensor:
    """Return minus the sum of an answer's log-probabilities, divided by the step's token count."""
    return -(logps * mask).sum() / num_tokens


# ---- Rows -> losses: each of the three stages yields a loss and a metric for each row of a step,
# so that `train` computes the gradient of one row, and frees its memory, before the next row


def grpo(model, reference, rows, options):
    """Sample G completions of each prompt, and reinforce those that are better than their group."""
    for row in rows:
        prompt = make_prompt(model, row)
        completions, mask = sample(model, prompt, options.group, options.max_new_tokens)
        texts = decode(model, completions, mask)
        rewards = torch.tensor([reward(text, row["solution"]) for text in texts])
        advantages = group_advantages(rewards).to(mask.device)
        logps = log_probabilities(model, prompt, completions)  # (G, T)
        ref_logps = None
        if options.beta:
            with torch.no_grad():
                ref_logps = log_probabilities(reference, prompt, completions)
        old_logps = logps.detach()  # the samples are used for one update
        loss = grpo_loss(logps, old_logps, advantages, mask, 0.2, options.beta, ref_logps)
        yield loss / len(rows), rewards


def dpo(model, reference, rows, options):
    """Train the policy to prefer the chosen answer more strongly than the reference does."""
    for row in rows:
        prompt = make_prompt(model, row)
        answers, mask = tokenize_answers(model, [row["chosen"], row["rejected"]])
        with torch.no_grad():
            ref_logps = log_probabilities(reference, prompt, answers)
        logps = log_probabilities(model, prompt, answers)
        loss = dpo_loss(logps, ref_logps, mask, options.beta)
        yield loss / len(rows), loss.detach()


def sft(model, reference, rows, options):
    """Raise the probability of demonstrated answers."""
    answers = [tokenize_answers(model, [row["completion"]]) for row in rows]
    num_tokens = sum(mask.sum() for _, mask in answers)
    for row, (ids, mask) in zip(rows, answers, strict=True):
        logps = log_probabilities(model, make_prompt(model, row), ids)
        loss = sft_loss(logps, mask, num_tokens)
        yield loss, loss.detach() * len(rows)  # the mean of these metrics is the loss of the step


NO_REWARD = """All completions of the first step earned 0. A completion earns a reward if it has the
form <think>...</think><answer>...</answer>. If the next steps earn 0, teach the form first: stop
with Ctrl-C, and run --sft on rows with "completion", for example
"<think>I see a cat on the left and one on the right.</think><answer>2</answer>"."""


def train(model, rows, stage, options):
    """Run optimizer steps; each step computes the gradients of its rows one after the other."""
    reference = copy.deepcopy(model) if options.beta or stage is dpo else None
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    order = []
    for step in range(options.steps):
        while len(order) < options.rows_per_step:
            order += random.sample(rows, len(rows))  # each row once before any occurs again
        batch, order = order[: options.rows_per_step], order[options.rows_per_step :]
        metrics = []
        for loss, metric in stage(model, reference, batch, options):
            loss.backward()
            metrics.append(metric)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        # The learning rate rises during the warmup, and then falls to a tenth of its maximum.
        decay = (options.steps - step) / max(1, options.steps - options.warmup)
        factor = min((step + 1) / max(1, options.warmup), 0.1 + 0.9 * decay)
        optimizer.param_groups[0]["lr"] = options.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        report(stage, step + 1, options.steps, metrics)


def report(stage, step, steps, metrics):
    """Print the mean of a step's metrics, and say so if the rewards of GRPO teach nothing."""
    mean = torch.stack([metric.mean() for metric in metrics]).mean()
    text = f"{stage.__name__} step {step} of {steps}: {mean:.3f}"
    end = "\n" if step % 10 == 0 or step == steps else "\r"
    if stage is grpo and all((rewards == rewards[0]).all() for rewards in metrics):
        text += ", all completions of a prompt earned the same, so nothing was learned"
        end = "\n"
    print(text, end=end, flush=True)
    if stage is grpo and step == 1 and not torch.cat(metrics).any():
        print(NO_REWARD)


# ---- The built-in task: name the object in a small image. There are 12 answers.

COLORS = {"red": (220, 50, 47), "green": (60, 160, 60), "blue": (50, 90, 210)}
COLORS |= {"yellow": (225, 190, 20), "purple": (140, 60, 170), "black": (35, 35, 35)}
LABELS = [f"{color} {shape}" for color in COLORS for shape in ("square", "triangle")]
CONTROL = "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start"
CONTROL += " quad_end vision_start vision_end vision_pad image_pad video_pad"
DECODER = {"model_type": "qwen2_5_vl", "hidden_size": 128, "intermediate_size": 256}
DECODER |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODER |= {"rope_theta": 20.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
DECODER |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 4096}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
TOWER |= {"out_hidden_size": 128, "patch_size": 7, "window_size": 28, "fullatt_block_indexes": [1]}


def tagged(label) -> str:
    return f"<think>I see {label.split()[0]}</think><answer>{label}</answer>"


def draw_row(wrong=0.0) -> dict:
    """Draw a random object; with probability `wrong`, the demonstrated label is random, too."""
    label = random.choice(LABELS)
    other = random.choice([name for name in LABELS if name != label])
    color, shape = label.split()
    image = PIL.Image.new("RGB", (56, 56), tuple(random.choices(range(200, 256), k=3)))
    side = random.randint(32, 52)
    left, top = random.randint(0, 56 - side), random.randint(0, 56 - side)
    right, bottom = left + side - 1, top + side - 1
    upper = [((left + right) / 2, top)] if shape == "triangle" else [(right, top), (left, top)]
    corners = [(left, bottom), (right, bottom), *upper]
    PIL.ImageDraw.Draw(image).polygon(corners, COLORS[color])
    right = tagged(label)
    completion = tagged(random.choice(LABELS)) if random.random() < wrong else right
    # A rejected answer names another object (everywhere or only in <answer>) or has a wrong form.
    cut = random.randrange(1, len(right))
    wrong_form = right[:cut] + right[cut + 4 :]
    rejected = random.choice([tagged(other), right.replace(label, other), wrong_form])
    answers = {"completion": completion, "chosen": right, "rejected": rejected}
    return {"images": [image], "problem": "What is it?", "solution": label, **answers}


def make_folder(folder):
    """Write a Hugging Face folder with 0.74 million random weights and a small tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["system\nYou are a helpful assistant.", "user\nWhat is it?", *map(tagged, LABELS)]
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([f"<|{name}|>" for name in CONTROL.split()])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(f"<|{name}|>") for name in CONTROL.split()}
    config = DECODER | {"vocab_size": tokenizer.get_vocab_size(), "vision_config": TOWER}
    config |= {"bos_token_id": ids["endoftext"], "eos_token_id": ids["im_end"]}
    config |= {f"{kind}_token_id": ids[f"{kind}_pad"] for kind in ("image", "video")}
    config |= {f"vision_{end}_token_id": ids[f"vision_{end}"] for end in ("start", "end")}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 7, "merge_size": 2}
    images |= {"min_pixels": 196, "max_pixels": 12845056}
    names = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    write(folder / "config.json", config)
    write(folder / "preprocessor_config.json", images)
    write(folder / "tokenizer_config.json", names | {"pad_token": "<|endoftext|>"})
    ends = {"eos_token_id": [ids["im_end"], ids["endoftext"]], "pad_token_id": ids["endoftext"]}
    write(folder / "generation_config.json", ends)
    model = QwenVL(read_config(folder))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            inputs = weight[0].numel()
            nn.init.normal_(weight, std=0.02 if "embed_tokens" in name else inputs**-0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})


def accuracy(model, rows) -> float:
    """Sample two completions of each row, and return the share of right answers."""
    rewards = []
    for row in rows:
        completions, mask = sample(model, make_prompt(model, row), 2, 20)
        rewards += [reward(text, row["solution"]) for text in decode(model, completions, mask)]
    return sum(value > 1 for value in rewards) / len(rewards)


def train_tiny(options) -> QwenVL:
    """Train a tiny model with SFT on 96 demonstrations, half of them random, and GRPO or DPO.

    The demonstrations teach the form of an answer, so that some samples earn a reward.
    """
    torch.set_num_threads(1)  # the tensors are too small to share the work
    make_folder(f"{options.output}/random")
    model = load(f"{options.output}/random")
    held_out = [draw_row() for _ in range(128)]
    first = argparse.Namespace(steps=40, rows_per_step=32, learning_rate=3e-3, warmup=10, beta=0.0)
    train(model, [draw_row(wrong=0.5) for _ in range(96)], sft, first)
    print(f"accuracy after SFT {accuracy(model, held_out):.3f}")
    train(model, [draw_row() for _ in range(2560)], options.stage, options)
    print(f"accuracy after {options.stage.__name__} {accuracy(model, held_out):.3f}")
    return model


# ---- Command line


def read_rows(file, answers) -> list[dict]:
    """Read rows from JSON Lines, in which image paths are relative to the file."""
    rows = []
    for number, line in enumerate(Path(file).read_text("utf-8").split("\n"), 1):
        if not line:
            continue
        row = {key: value for key, value in json.loads(line).items() if value is not None}
        fields = ["problem", *answers]
        for field in fields if "images" in row else ["image", *fields]:
            if field not in row:
                raise ValueError(f"{file}, line {number}: the row has {[*row]}, but no {field!r}")
        names = row["images"] if "images" in row else [row["image"]]
        row["images"] = [Path(file).parent / name for name in names]
        # GRPO rewards one form of answers, so its question asks for the form. For SFT and DPO, it
        # asks if the answer has the form, so that GRPO after SFT has the same question.
        wants_form = answers == ["solution"] or "<answer>" in row[answers[0]]
        if wants_form and "<answer>" not in row["problem"]:
            row["problem"] += ASK
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no rows")
    return rows


def train_folder(options) -> QwenVL:
    """Train the model in a Hugging Face folder on a file of rows, on a GPU if there is one."""
    needed = {grpo: ["solution"], sft: ["completion"], dpo: ["chosen", "rejected"]}
    rows = read_rows(options.rows, needed[options.stage])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(options.folder, device, max_pixels=options.max_pixels)
    # Activation checkpointing keeps only the input of each layer for the backward pass.
    for layer in [*model.visual.blocks, *model.model["layers"]]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    train(model, rows, options.stage, options)
    return model


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", nargs="?", help="Hugging Face folder (default: a tiny model)")
    parser.add_argument("rows", nargs="?", help="JSON Lines file")
    parser.add_argument("--sft", action="store_const", dest="stage", const=sft, default=grpo)
    parser.add_argument("--dpo", action="store_const", dest="stage", const=dpo)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--rows_per_step", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--warmup", type=int, default=10, help="steps of rising learning rate")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL, or DPO's beta")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--max_pixels", type=int, default=401408, help="largest area of an image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/minimal", help="folder for the trained model")
    options = parser.parse_args()
    if options.stage is grpo and options.group < 2:
        parser.error("--group must be at least 2: the rewards of a group are compared")
    if options.folder and not options.rows:
        parser.error("name a file of rows after the folder")
    if options.folder and Path(options.folder).resolve() == Path(options.output).resolve():
        parser.error("--output must not be the folder of the model")
    if not options.folder:
        parser.set_defaults(steps=160, learning_rate=3e-4, warmup=5, beta=0.02, max_new_tokens=20)
    if options.stage is dpo:
        parser.set_defaults(beta=0.1 if options.folder else 1.0)
    options = parser.parse_args()  # with the defaults of this run
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    model = train_folder(options) if options.folder else train_tiny(options)
    save(model, options.output)
    print(f"saved {options.output}")


if __name__ == "__main__":
    main()
