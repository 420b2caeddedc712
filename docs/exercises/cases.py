"""Exercises: task, hint, common mistakes, and calls that test a function.

A decorated generator gets the function, or the class of a method, and yields (description, result) per call. Its
docstring is the task. Mistakes are {description: (lines of minimal.py, wrong lines)}; the check names a mistake that
explains a wrong result.
"""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import PIL.Image
import torch

import minimal

EXERCISES = []


@dataclass(eq=False)  # hashable
class Exercise:
    number: int
    name: str  # function or method in minimal.py, such as Vision.forward
    task: str
    hint: str
    mistakes: dict[str, tuple[str, str]]
    calls: Callable


def exercise(name: str, hint: str, mistakes: dict[str, tuple[str, str]]):
    """Add an exercise with the decorated generator as calls."""

    def add(calls):
        task, number = inspect.getdoc(calls), len(EXERCISES) + 1
        EXERCISES.append(Exercise(number, name, task, inspect.cleandoc(hint), mistakes, calls))

    return add


@functools.cache
def tiny_model() -> minimal.QwenVL:
    """Build the tiny model with random weights."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        minimal.make_folder(folder)
        return minimal.load(folder)


def noise(height: int, width: int) -> PIL.Image.Image:
    """Return an image with random pixels."""
    return PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def gradients(result: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Return the gradient of a weighted sum of a result to tensors that it should reach, None where none arrives."""
    found = [None] * len(leaves)
    if result.requires_grad:
        weights = torch.linspace(0.5, 1.5, result.numel()).view_as(result).to(result.dtype)
        found = torch.autograd.grad((result * weights).sum(), [*leaves.values()], allow_unused=True, retain_graph=True)
    return {f"the gradient to {name}": gradient for name, gradient in zip(leaves, found, strict=True)}


@exercise(
    "smart_resize",
    """
    Scale both sides by the square root of an area ratio, which comes from the size of the file and not from the rounded
    size. Rounding to the nearest multiple could cross the bound again, so which way must you round when you shrink the
    image, and which way when you enlarge it? And what if a side of a very thin image shrinks to less than one factor?
    """,
    {
        "you round a half up; Python's round takes the even multiple": ("np.round(", "np.floor(0.5 + "),
        "you scale the sides by the ratio of areas; the square root is missing": ("math.sqrt(height", "(height"),
        "you round down when you enlarge the image, so its area stays below min_pixels": ("np.ceil", "np.floor"),
        "you round to the nearest multiple when you shrink the image, so its area can exceed max_pixels again":
            ("np.floor", "np.round"),
        "a very thin image gets a side of 0; each side must be at least `factor`": ("maximum(factor", "maximum(0"),
        "you return (width, height); the height comes first":
            ("int(rounded[0]), int(rounded[1])", "int(rounded[1]), int(rounded[0])"),
        "you test the area of the file; test the area of the rounded size": ("rounded.prod()", "height * width"),
        "you round up to the first multiple; take the nearest": ("np.round(sides", "np.ceil(sides"),
        "you round down to the first multiple; take the nearest": ("np.round(sides", "np.floor(sides"),
        "you shrink the rounded size; shrink the size of the file": ("sides / shrink", "rounded / shrink"),
        "you enlarge the rounded size; enlarge the size of the file": ("sides * grow", "rounded * grow"),
        "an image that is too small stays small": ("elif rounded.prod() < min_pixels", "elif False"),
        "an image that is too large stays large": ("rounded.prod() > max_pixels", "False"),
        "shrink is inverted": ("sides / shrink", "sides * shrink"),
        "you enlarge the image to max_pixels; enlarge it to min_pixels":
            ("math.sqrt(min_pixels / ", "math.sqrt(max_pixels / "),
        "you shrink by the ratio of the rounded area; take the area of the file":
            ("math.sqrt(height * width / max_pixels)", "math.sqrt(rounded.prod() / max_pixels)"),
        "you shrink images above min_pixels; shrink them above max_pixels":
            ("rounded.prod() > max_pixels", "rounded.prod() > min_pixels"),
    },
)  # fmt: skip
def _(smart_resize):
    """
    The vision tower needs images whose sides are multiples of `factor`. Take the nearest multiples, by the rule of
    Python's `round`. If their area is above max_pixels or below min_pixels, scale both sides of the file by the same
    number so that the area fits, and round so that it cannot cross the bound again.
    """
    sizes = [(1092, 1568), (100, 130), (30, 40), (70, 126), (5000, 29), (1001, 1001), (1015, 1008), (20, 300)]
    for height, width in sizes:
        description = f"height {height}, width {width}, factor 28, area from 3136 to 1003520"
        yield description, smart_resize(height, width, 28, 3136, 1003520)
    yield "height 5600, width 28, factor 28, area from 784 to 50000", smart_resize(5600, 28, 28, 784, 50000)


@exercise(
    "patchify",
    """
    Reshape the two frames to (2, h // merge, merge, patch, w // merge, merge, patch, 3). One transpose brings these
    eight axes into the order of the task, and one reshape joins them. PIL's sizes are (width, height), numpy's arrays
    are (height, width).
    """,
    {
        "your patches are in raster order; the merge x merge patches of a block are neighbors":
            ("(1, 4, 2, 5, 7,", "(1, 2, 4, 5, 7,"),
        "the numbers of a patch begin with the frame; the color comes first": ("7, 0, 3, 6)", "0, 7, 3, 6)"),
        "the three colors of a pixel are neighbors; the color comes first": ("7, 0, 3, 6)", "0, 3, 6, 7)"),
        "you did not subtract MEAN": (" - MEAN", ""),
        "you did not divide by STD": (" / STD", ""),
        "you did not divide the pixels by 255": (" / 255", ""),
        "you divide by STD before you subtract MEAN": (
            "(pixels.astype(np.float32) - MEAN) / STD", "pixels.astype(np.float32) / STD - MEAN"
        ),
        "you return w before h": ("patches, h, w", "patches, w, h"),
        "you exchanged the sides in `resize`; PIL's sizes are (width, height)":
            ("resize((width, height)", "resize((height, width)"),
        "your second frame is empty; it is equal to the first": ("[pixels, pixels]", "[pixels, 0 * pixels]"),
        "the rows and columns inside a patch are exchanged": ("0, 3, 6)", "0, 6, 3)"),
        "the rows and columns of patches inside a block are exchanged": ("(1, 4, 2, 5,", "(1, 4, 5, 2,"),
        "the rows and columns of blocks are exchanged": ("(1, 4, 2, 5,", "(4, 1, 2, 5,"),
        "you did not resize with BICUBIC": ("BICUBIC", "BILINEAR"),
    },
)  # fmt: skip
def _(patchify):
    """
    Resize the image to the size of smart_resize (bicubic), divide its pixels by 255, subtract MEAN and divide by STD.
    Cut it into patches of patch x patch pixels. The merge x merge patches of a block are neighbors; blocks, and
    patches inside a block, go along the rows as in text. The numbers of a patch go by color, frame, row, column, and
    both of its frames are the same image. Return the patches, and their rows h and columns w.
    """
    for height, width, patch in ((8, 8, 4), (16, 24, 4), (50, 90, 14)):
        patches, h, w = patchify(noise(height, width), patch, 2, 16, 12544)
        description = f"an image of {height} x {width} pixels in patches of {patch} x {patch}"
        yield description, {"h": h, "w": w, "patches": patches}


@exercise(
    "render",
    """
    A control token such as <|im_start|> is one id, from tokenizer.token_to_id; the text between two of them is encoded
    in one piece by to_ids. In a user's question, the text "<|im_end|>" stays text, so that nobody can inject a turn.
    """,
    {
        "the line feeds after <|im_end|> are missing": (' + to_ids(tokenizer, "\\n")', ""),
        "your control tokens are text, which is split into several tokens; use tokenizer.token_to_id":
            ('[tokenizer.token_to_id(f"<|{name}|>")]', 'to_ids(tokenizer, f"<|{name}|>")'),
        "each image needs as many <|image_pad|> as it has tokens": (" * length", ""),
        "the system message is missing":
            ('start + to_ids(tokenizer, "system\\nYou are a helpful assistant.") + end', "[]"),
        "the opening of the assistant's turn is missing": (' + start + to_ids(tokenizer, "assistant\\n")', ""),
        "the line feed after `assistant` is missing": ('"assistant\\n"', '"assistant"'),
        "the line feed after `user` is missing": ('f"user\\n{first}"', 'f"user{first}"'),
        "<|vision_start|> is missing": ('        ids += control("vision_start")\n', ""),
        "<|vision_end|> is missing": ('control("vision_end") + ', ""),
        "the text after an image is missing": (' + to_ids(tokenizer, text)\n', "\n"),
        "without <image> in the question, the images come before it":
            ('"<image>" * len(image_lengths) + problem', 'problem + "<image>" * len(image_lengths)'),
    },
)  # fmt: skip
def _(render):
    """
    Return the ids of one question, whose images have the given numbers of tokens. In the docstring's example, only the
    line feeds that are written out belong to the text.
    """
    tokenizer = tiny_model().tokenizer
    questions = [("What?", []), ("What is it?", [3]), ("Is <image> the same as <image> or <|im_end|>?", [2, 1])]
    for problem, lengths in questions:
        ids = render(tokenizer, problem, lengths)
        answer = [tokenizer.decode([i], skip_special_tokens=False) for i in ids] if isinstance(ids, list) else ids
        yield f"the question {problem!r} with images of {lengths} tokens", {"tokens": answer}


@exercise(
    "mrope_positions",
    """
    The docstring has an example: an image of 2 x 3 tokens begins at position 2, where the text before it ended, and
    text resumes at 5, not at 8. A text token is like an image of 1 x 1. torch.cartesian_prod lists rows and columns.
    """,
    {
        "you count the tokens of an image one by one, like text; that is not M-RoPE":
            ("offsets.T", "torch.arange(rows * columns).expand(3, -1)"),
        "text resumes after as many positions as the image has tokens; it must resume after its longer side":
            ("max(rows, columns)", "rows * columns"),
        "text resumes at the largest position of the image; it must resume one past it":
            ("max(rows, columns)", "max(rows, columns, 2) - 1"),
        "you exchanged rows and columns": ("rows, columns = next", "columns, rows = next"),
        "text resumes after the rows of an image; it must resume after its longer side": ("max(rows, columns)", "rows"),
        "text resumes after the columns of an image; it must resume after its longer side":
            ("max(rows, columns)", "columns"),
        "text resumes after the shorter side of an image; take the longer one": ("max(rows", "min(rows"),
        "the tokens of an image are in columns; they are row by row":
            ("torch.cartesian_prod(time, torch.arange(rows), torch.arange(columns))",
             "torch.cartesian_prod(time, torch.arange(columns), torch.arange(rows))[:, [0, 2, 1]]"),
        "your result is (L, 3); the axes come first": ("torch.cat(pieces, 1)", "torch.cat(pieces, 1).T"),
        "the axes are in the order row, column, time":
            ("torch.cat(pieces, 1)", "torch.cat(pieces, 1).roll(-1, 0)"),
        "time counts on inside an image; all its tokens have one time":
            ("position + offsets.T", "position + offsets.T + torch.tensor([[1], [0], [0]]) * "
             "torch.arange(rows * columns)"),
        "an image begins at position 0; it must begin where the text before it ended":
            ("(position + offsets", "(position * (rows * columns == 1) + offsets"),
    },
)  # fmt: skip
def _(mrope_positions):
    """
    Number the tokens ids, a list, on three axes. Where an id equals image_token, an image begins, and takes rows x
    columns tokens; `grids` has the (rows, columns) of each image. Return a tensor of integers (3, L).
    """
    one = "2 tokens of text, an image of 2 x 3, 1 of text"
    two = "an image of 3 x 2, 1 token of text, an image of 1 x 3, 2 of text"
    yield "4 tokens of text", {"positions": mrope_positions([0] * 4, [], 1)}
    yield one, {"positions": mrope_positions([0, 0, *[1] * 6, 0], [(2, 3)], 1)}
    yield two, {"positions": mrope_positions([*[1] * 6, 0, *[1] * 3, 0, 0], [(3, 2), (1, 3)], 1)}


@exercise(
    "rotate",
    """
    A pair (a, b) rotated by t is (a cos t - b sin t, b cos t + a sin t). x.chunk(2, -1) gives all a and all b. An angle
    of 100.3 would be 100.5 in bfloat16, so compute in float32 and convert the result.
    """,
    {
        "your pairs are neighbors, as in the paper; here, x_i belongs to x_{i + D/2}":
            ("x.chunk(2, -1)", "x.unflatten(-1, (-1, 2)).unbind(-1)"),
        "you rotate in the other direction": ("b * sin, b * cos + a", "b * -sin, b * cos - a"),
        "you exchanged cos and sin":
            ("cos = angles.cos()\n    sin = angles.sin()", "sin, cos = angles.cos(), angles.sin()"),
        "the second half needs a sin": ("b * cos + a * sin", "b * cos"),
        "the first half needs - b sin": ("a * cos - b * sin", "a * cos"),
        "both halves have a minus; the second one has a plus": ("b * cos + a * sin", "b * cos - a * sin"),
        "both halves have a plus; the first one has a minus": ("a * cos - b * sin", "a * cos + b * sin"),
        "the two halves of the result are exchanged":
            ("[a * cos - b * sin, b * cos + a * sin]", "[b * cos + a * sin, a * cos - b * sin]"),
        "your result has pairs of neighbors; put one half after the other":
            ("torch.cat([a * cos - b * sin, b * cos + a * sin], -1)",
             "torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)"),
        "you convert the angles before cos and sin; convert the results": (
            "a, b", "angles = angles.to(x.dtype)\n    a, b"
        ),
    },
)  # fmt: skip
def _(rotate):
    """Rotate pairs of x. The angles are float32, and the result has the dtype of x."""
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [100.3, 10.03]])
    yield "x = 1, 2, 3, 4 at angles of 1 and 0.1", rotate(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), angles[1:2])
    x = torch.randn(2, 3, 4, requires_grad=True)
    rotated = rotate(x, angles)
    yield "random x (2, 3, 4)", {"the result": rotated, **gradients(rotated, {"x": x})}
    yield "random x (2, 3, 4) in bfloat16", rotate(torch.randn(2, 3, 4).bfloat16(), angles)


@exercise(
    "Vision.forward",
    """
    The rows and columns of all patches come from torch.cartesian_prod, in raster order; view, transpose and reshape
    bring them into the order of patchify. `places // side` is the window of each patch. An angle is a place times
    frequencies(count, 10000.0, device). `None` as a mask lets each patch see all others.
    """,
    {
        "your rows and columns are in raster order, but patchify puts the patches of a block together":
            (".transpose(1, 2)", ""),
        "all your blocks see the whole image": ("None if sees_all else same_window", "None"),
        "all your blocks see one window only": ("None if sees_all else same_window", "same_window"),
        "the side of your windows is in merged tokens; here it is in patches": ("// merge * merge", "// merge"),
        "your windows cut image tokens; round their side down to a multiple of merge": (" // merge * merge", ""),
        "your angles begin with the column; the row comes first": ("(places[..., N", "(places.flip(1)[..., N"),
        "the norm of the merger is missing": ('self.merger["ln_q"](x)', "x"),
        "you exchanged the blocks with windows and the others": ("i in self.config", "i not in self.config"),
        "a patch sees all windows in its row and column; both must be equal":
            ("(windows[:, None] == windows).all(-1)", "(windows[:, None] == windows).any(-1)"),
        "your windows have one row of patches; compare both places": (").all(-1)  # (P, P)", ")[..., 0]"),
        "True in a mask means that a patch is seen": ("else same_window", "else ~same_window"),
        "the frequencies need theta 10000": ("10000.0", "1000000.0"),
        "the blocks get no gradient, because you detached their result":
            ('self.merger["ln_q"](x)', 'self.merger["ln_q"](x.detach())'),
    },
)  # fmt: skip
def _(Vision):
    """
    Run the tower on the patches (P, 1176) of an image with h rows and w columns of patches:
    1. The convolution's kernels are as large as a patch, so it is one matrix product: x (P, width).
    2. Half of the angles (P, D / 2) come from the row of a patch, half from its column, in the order of patchify. Both
       halves use the same D / 4 frequencies.
    3. A block in config["fullatt_block_indexes"] sees the whole image. In the others, a patch sees its window of side x
       side patches; side is config["window_size"] pixels in patches, rounded down to a multiple of merge.
    4. Apply self.merger's norm, join merge * merge neighbors to one vector, and apply its mlp: (P / 4, E).
    """
    config = minimal.VISION_DEFAULTS | minimal.TOWER | {"depth": 3, "window_size": 41}  # 5, rounded down to 4 patches
    tower = Vision(config)
    for name, h, w in (("one window", 4, 4), ("2 x 2 windows", 8, 8), ("windows cut off at the edges", 6, 10)):
        tokens = tower(torch.randn(h * w, 3 * 2 * 7 * 7), h, w)
        reached = gradients(tokens, dict(tower.named_parameters()))
        yield f"{h} x {w} patches, {name}", {"tokens": tokens.detach(), **reached}


@exercise(
    "Layer.forward",
    """
    self.project gives (n, heads, L, D). torch.cat along the axis of tokens puts the past before the new keys, and
    past_k.expand(n, -1, -1, -1) repeats the prompt's keys without a copy. repeat_interleave gives each query head its
    head of keys. Both the attention and the MLP have a norm before them and add their result to x.
    """,
    {
        "the keys are not rotated": ('"k_proj", normed), angles)', '"k_proj", normed), 0 * angles)'),
        "you rotate the values; only queries and keys are rotated":
            ('self.project("v_proj", normed)', 'rotate(self.project("v_proj", normed), angles)'),
        "neighboring query heads share a head of keys; use repeat_interleave":
            ("repeat_interleave(self.queries_per_key, 1)", "repeat(1, self.queries_per_key, 1, 1)"),
        "the mask is missing": ("shared_v, mask)", "shared_v)"),
        "attention must add its result to x": ("x = x + self.self_attn", "x = self.self_attn"),
        "the MLP must add its result to x": ("x = x + self.mlp", "x = self.mlp"),
        "the norm before attention is missing": ("self.input_layernorm(x)", "x"),
        "the norm before the MLP is missing": ("self.post_attention_layernorm(x)", "x"),
        "you exchanged the two norms": ("self.input_layernorm(x)", "self.post_attention_layernorm(x)"),
        "the queries are not rotated": ('"q_proj", normed), angles)', '"q_proj", normed), 0 * angles)'),
        "the values come from x before the norm": ('"v_proj", normed', '"v_proj", x'),
        "add the result of attention to x, not to its norm": ("x = x + self.self_attn", "x = normed + self.self_attn"),
        "the past comes before the new keys": (
            "[past_k.expand(len(x), -1, -1, -1), k]", "[k, past_k.expand(len(x), -1, -1, -1)]"
        ),
        "return keys and values before they are repeated": ("x, (k, v)", "x, (shared_k, shared_v)"),
        "return also the keys and values of the past":
            ("x, (k, v)", "x, (k[:, :, -x.shape[1]:], v[:, :, -x.shape[1]:])"),
        "the past is detached, so the prompt learns nothing":
            ("past_k, past_v = past", "past_k, past_v = past[0].detach(), past[1].detach()"),
    },
)  # fmt: skip
def _(Layer):
    """
    Run attention and the MLP on x (n, L, E). The angles are (L, D / 2), and the mask (L, past + L) is True where a
    token may look. `past` is None or the keys and values of one prompt, (1, heads, past, D) each, which all n rows
    share. Return the new states (n, L, E), and a tuple with all keys and values, those of the past included, before
    they are repeated for the query heads.
    """
    layer = Layer(minimal.DECODER)
    angles = torch.randn(5, 16)
    past = torch.randn(1, 2, 5, 32, requires_grad=True), torch.randn(1, 2, 5, 32, requires_grad=True)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    calls = {
        "a prompt of 5 tokens": (torch.randn(1, 5, 128, requires_grad=True), angles, mask[:5, :5], None),
        "3 completions of 2 tokens after a prompt of 5":
            (torch.randn(3, 2, 128, requires_grad=True), angles[:2], mask[5:], past),
    }  # fmt: skip
    for description, (x, *arguments) in calls.items():
        states, (keys, values) = layer(x, *arguments)
        leaves = {"x": x, **dict(layer.named_parameters())}
        if arguments[-1]:
            leaves |= {"the keys of the past": past[0], "the values of the past": past[1]}
        answer = {"keys": keys.detach(), "values": values.detach(), "states": states.detach()}
        yield description, answer | gradients(states, leaves)


class Chain:
    """Stub model with 6 tokens: a token determines the probabilities of the next one.

    After "?" comes "Yes sir <|im_end|>" (70 %) or "No <|endoftext|>". After an end token, the answer begins again.
    """

    TOKENS = ("?", "Yes", "sir", "No", "<|im_end|>", "<|endoftext|>")
    NEXT = torch.zeros(6, 6)
    NEXT[[0, 0, 1, 2, 3, 4, 5], [1, 3, 2, 4, 5, 1, 3]] = torch.tensor([0.7, 0.3, 1, 1, 1, 1, 1])

    def __init__(self):
        self.calls = []
        self.updates = 0
        self.tokenizer = SimpleNamespace(token_to_id=self.TOKENS.index)
        self.lm_head = torch.nn.Identity()

    def __call__(self, ids, positions, cache=None, images=()):
        given = f"{len(images)} images and {'a' if cache else 'no'} cache"
        self.calls.append(f"{tuple(ids.shape)} ids at the positions {positions.tolist()}, {given}")
        return self.NEXT[ids].log(), "cache"


@exercise(
    "sample",
    """
    The states of the prompt (1, L, E) expand to G rows, and lm_head of the last one predicts the first tokens.
    torch.multinomial samples. A token belongs to the mask if no end came before it. An image takes fewer positions than
    tokens, so the first new position is one past the largest position of the prompt.
    """,
    {
        "you take the most likely token, which is greedy decoding and not sampling":
            ("torch.multinomial(probabilities, 1)", "probabilities.argmax(-1, keepdim=True)"),
        "you divide the logits by a temperature; here it is 1": ("logits.float()", "(logits.float() / 0.9)"),
        "your mask leaves out the token that ends a completion":
            ("mask.append(goes_on)", "mask.append(goes_on & (token != ends).all(1))"),
        "your mask is True after the end of a completion": ("goes_on = goes_on & (token", "goes_on = (token"),
        "<|endoftext|> ends a completion, too": ("(token != ends).all(1)", "(token != ends[:1]).all(1)"),
        "you count positions from the number of tokens; count from the prompt's largest position":
            ("prompt.positions.max() + 1 + t", "torch.tensor(len(prompt.ids) + t)"),
        "your first token is at the last position of the prompt; it must be one past it": ("+ 1 + t", "+ t"),
        "all your tokens have one position; count on": ("+ 1 + t", "+ 1"),
        "the prompt needs its images": (", images=prompt.images", ""),
        "later tokens need the cache": (".expand(3, 1), cache)", ".expand(3, 1))"),
        "your mask is True everywhere": ("mask.append(goes_on)", "mask.append(torch.ones_like(goes_on))"),
        "you go on after all completions have ended": ("if not goes_on.any()", "if False"),
        "you stop when one completion has ended; wait for all": ("if not goes_on.any()", "if not goes_on.all()"),
        "the first state predicts the second token of the prompt; take the last state":
            ("states[:, -1]", "states[:, 0]"),
    },
)  # fmt: skip
def _(sample):
    """
    Sample G completions. model(ids (n, L), positions (3, L), cache, images) returns the states and a new cache. Call it
    once for the prompt, with its images, and then once for each token but the last. Stop when all completions have
    ended or have max_new_tokens. <|im_end|> and <|endoftext|> end a completion. Return ids and mask, both (G, T).
    """
    positions = torch.tensor([0, 1, 1, 1, 2]).expand(3, -1)
    prompt = minimal.Prompt(torch.tensor([1, 1, 1, 1, 0]), positions, ["an image"])
    for most in (5, 2):
        model = Chain()
        ids, mask = sample(model, prompt, 20000, most)
        share = (ids[:, 0] == 1).double().mean().item()
        completions = [" ".join(Chain.TOKENS[i] for i in row[kept]) for row, kept in zip(ids, mask, strict=True)]
        answer = {
            "calls": model.calls[: ids.shape[1]],  # a call for the state of the last token is useless, but right
            "the shape of the mask": tuple(mask.shape),
            "completions": sorted(set(completions)),
            "the share of Yes": 0.7 if abs(share - 0.7) < 0.015 else round(share, 3),
        }
        yield f"20000 completions with up to {most} tokens of a prompt with 5 tokens, the last at position 2", answer


@exercise(
    "log_probabilities",
    """
    Run the prompt once, and then all tokens of the completions with its cache. A state predicts the token after it: the
    prompt's last state predicts the first token, and the last token predicts nothing. After log_softmax over the
    vocabulary, gather takes one number of each row.
    """,
    {
        "a state predicts the next token; you read the probability of the token that went in":
            ("torch.cat([last, after[:, :-1]], 1)", "after"),
        "you count positions from the number of tokens; an image takes fewer positions than tokens":
            ("prompt.positions.max() + 1", "len(prompt.ids)"),
        "your first token is at the last position of the prompt; it must be one past it": (".max() + 1", ".max()"),
        "the completions do not see the prompt; use its cache": (".expand(3, T), cache)", ".expand(3, T))"),
        "your values are probabilities; the logarithm is missing": ("log_softmax", "softmax"),
        "the softmax runs over the tokens; use the last axis, the vocabulary": ("log_softmax(-1)", "log_softmax(1)"),
        "your values are logits; the log_softmax is missing": (".log_softmax(-1)", ""),
        "the prompt needs its images": (", images=prompt.images", ""),
        "all your tokens have one position; count on":
            ("torch.arange(T, device=completions.device)", "torch.zeros(T, dtype=torch.long)"),
        "the prompt runs without gradient, so the model learns nothing from images and questions":
            ("states, cache = model(prompt.ids[None], prompt.positions, images=prompt.images)",
             "with torch.no_grad():\n            states, cache = model(prompt.ids[None], prompt.positions, "
             "images=prompt.images)"),
        "the first prompt state predicts the prompt's second token; take the last": ("states[:, -1:]", "states[:, :1]"),
        "you keep probabilities above 1e-4, so unlikely tokens have no gradient; log_softmax needs no limit":
            ("logits.log_softmax(-1)", "logits.softmax(-1).clamp(min=1e-4).log()"),
    },
)  # fmt: skip
def _(log_probabilities):
    """Score completions (G, T). model(ids (n, L), positions (3, L), cache, images) returns the states and a cache."""
    model = tiny_model()
    completions = torch.tensor([[20, 30, 40], [20, 21, 22]])
    for images in ([], [noise(28, 56)]):
        prompt = minimal.make_prompt(model, {"images": images, "problem": "What is it?"})
        logps = log_probabilities(model, prompt, completions)
        leaves = {name: weight for name, weight in model.named_parameters() if images or "visual" not in name}
        answer = {"log-probabilities": logps.detach(), **gradients(logps, leaves)}
        yield f"2 completions of a prompt with {len(images)} images", answer
    sure = copy.deepcopy(model)
    with torch.no_grad():
        sure.lm_head.weight *= 10
    logps = log_probabilities(sure, prompt, completions)
    answer = {"log-probabilities": logps.detach(), **gradients(logps, {"lm_head.weight": sure.lm_head.weight})}
    yield "2 completions whose tokens have probabilities below 1e-7", answer


@exercise(
    "group_advantages",
    """
    rewards.view(-1, num_generations) has a group in each row. The mean and std of a tensor do almost all; std divides
    by n - 1. The 1e-4 keeps advantages small in a group with tiny differences, and prevents 0 / 0 in a group of equal
    rewards. Subtract one of them from all before you take the mean, and it is exactly 0.
    """,
    {
        "you divide by n in the variance; this standard deviation divides by n - 1":
            ("True) + ", "True, correction=0) + "),
        "1e-4 is missing, so groups with tiny differences get advantages as large as other groups": (" + 1e-4", ""),
        "you divide by the variance; the square root is missing": ("groups.std(", "groups.var("),
        "1e-4 belongs to the standard deviation, not to the variance":
            ("(groups.std(1, keepdim=True) + 1e-4)", "(groups.var(1, keepdim=True) + 1e-4).sqrt()"),
        "1e-4 has another value in your function": ("+ 1e-4", "+ 1e-8"),
        "the division by the standard deviation is missing": (" / (groups.std(1, keepdim=True) + 1e-4)", ""),
        "you divide by the sum of squares; the standard deviation is a mean":
            ("groups.std(1, keepdim=True)", "centered.square().sum(1, keepdim=True).sqrt()"),
        "your mean is that of all groups": ("groups.mean(1, keepdim=True)", "groups.mean()"),
        "your standard deviation is that of all groups": ("groups.std(1, keepdim=True)", "groups.std()"),
        "the completions of a group are neighbors; view(-1, num_generations)":
            ("rewards.view(-1, num_generations)", "rewards.view(num_generations, -1).T"),
        "equal rewards do not give exactly 0, because their mean is rounded; subtract one of them from all first":
            ("    groups = groups - groups.amax(1, keepdim=True)\n", ""),
        "you subtract the largest reward instead of the mean": ("groups.mean(1, keepdim=True)", "0"),
        "your advantages have the wrong sign; subtract the mean from the reward":
            ("centered / (", "-centered / ("),
        "you subtract the mean of the other completions, which is RLOO; the mean includes the completion itself":
            ("centered / (", "centered * num_generations / (num_generations - 1) / ("),
    },
)  # fmt: skip
def _(group_advantages):
    """
    Turn rewards (n,) into advantages (n,). The num_generations rewards of a group are neighbors. Subtract the mean of
    the group, and divide by its standard deviation (with n - 1) plus 1e-4. Equal rewards give exactly 0, even if their
    mean is rounded.
    """
    for rewards in ([1.0, 1.0, 0.0, 0.0], [1.5, 0.5, 0.5, 0.0, 0.0], [0.5, 0.50005, 0.5, 0.50005], [1.0, 1.0, 1.0]):
        group = torch.tensor(rewards, dtype=torch.float64)
        yield f"rewards {rewards}", {"advantages": group_advantages(group, len(group))}
    groups = torch.tensor([1.0, 0.0, 0.0, 5.0, 6.0, 7.0], dtype=torch.float64)
    yield f"rewards {groups.tolist()} of two groups", {"advantages": group_advantages(groups, 3)}
    equal = group_advantages(torch.full((8,), 0.1), 8)
    are_zero = isinstance(equal, torch.Tensor) and not equal.any()
    yield "eight rewards of 0.1 in float32", {"that all advantages are 0": are_zero}


LOGPS = torch.tensor([[-1.0, -0.5, -2.0], [-0.3, -0.9, 4.0]], dtype=torch.float64, requires_grad=True)
MASK = torch.tensor([[True, True, True], [True, True, False]])


@exercise(
    "grpo_loss",
    """
    The ratio is the exponential of a difference of log-probabilities. advantages[:, None] is one column, which all
    tokens of a completion share. A loss is minimized, so the objective gets a minus, and the KL, which is a cost, a
    plus. Multiply by the mask before you add up, and divide by the number of tokens of each completion. The old
    log-probabilities are constants: without detach, the ratio of a policy to itself has no gradient.
    """,
    {
        "the ratio is inverted; divide the current probability by the old one":
            ("(per_token_logps - old_per_token_logps)", "(old_per_token_logps - per_token_logps)"),
        "you did not detach old_per_token_logps, so the ratio is 1 without a gradient":
            ("old_per_token_logps = per_token_logps.detach()", "old_per_token_logps = per_token_logps"),
        "the exponential is missing; a difference of logarithms is no ratio":
            ("log_ratio.exp()", "log_ratio"),
        "the KL is not multiplied by the ratio, so it has the gradient of KL(pi_ref || pi)": ("beta * ratio", "beta"),
        "the ratio of the KL is detached, so it has the gradient of KL(pi_ref || pi)":
            ("beta * ratio", "beta * ratio.detach()"),
        "the upper limit is 1 + epsilon_high": ("1 + epsilon_high", "1 + epsilon_low"),
        "the lower limit is 1 - epsilon_low": ("1 - epsilon_low", "1 - epsilon_high"),
        "divide by the number of tokens of each completion": ("(loss * mask).sum(1) / lengths", "(loss * mask).sum(1)"),
        "add up the completions, then divide by their number": ("per_completion.mean()", "per_completion.sum()"),
        "beta is missing": ("beta * ratio", "ratio"),
        "the ratio is not clipped": ("ratio.clamp(1 - epsilon_low, 1 + epsilon_high)", "ratio"),
        "you take the larger of the two terms; take the smaller one, which limits the update": ("h.min", "h.max"),
        "you clip without the minimum, so a token that moved in the wrong direction has no gradient to come back":
            ("-torch.min(ratio *", "-torch.min(clipped *"),
        "your loss has the wrong sign; it must be the negative of the objective": ("-torch.min", "torch.min"),
        "the sum includes tokens after the end of a completion; multiply by the mask": (" * mask", ""),
        "the ratio at padding can overflow, and inf * 0 is nan; multiply its logarithm by the mask":
            ("(per_token_logps - old_per_token_logps) * mask", "(per_token_logps - old_per_token_logps)"),
        "the KL at padding can overflow, and inf * 0 is nan; multiply its log-ratio by the mask":
            ("(ref_per_token_logps - per_token_logps) * mask", "(ref_per_token_logps - per_token_logps)"),
        "you divide by the number of columns; divide by the number of tokens of each completion":
            ("mask.sum(1).clamp(min=1)", "mask.shape[1]"),
        "you average over all tokens, as DAPO does; average over each completion, and then over the completions":
            ("per_completion.mean()", "(loss * mask).sum() / mask.sum()"),
        "you exchanged pi and pi_ref in the KL":
            ("ref_per_token_logps - per_token_logps", "per_token_logps - ref_per_token_logps"),
        "the KL has the wrong sign; it is a cost": ("loss + beta", "loss - beta"),
        "your KL is k1, the difference of log-probabilities; the paper uses k3": ("log_ref_ratio.expm1()", "0.0"),
        "your KL is k2, half of the squared difference; the paper uses k3":
            ("(log_ref_ratio.expm1() - log_ref_ratio)", "log_ref_ratio.square() / 2"),
        "your ratio is that of whole completions; take that of each token":
            ("log_ratio.exp()", "log_ratio.sum(1, keepdim=True).exp()"),
        "the -1 of k3 is missing": ("expm1", "exp"),
        "the KL is detached, so it has no gradient and no effect":
            ("ref_per_token_logps - per_token_logps", "ref_per_token_logps - per_token_logps.detach()"),
    },
)  # fmt: skip
def _(grpo_loss):
    """
    Compute the loss of one group. The log-probabilities and the mask are (G, T), the advantages (G,).
    old_per_token_logps is None if the policy itself has sampled, and ref_per_token_logps is None if beta is 0. The KL
    is estimated by k3, pi_ref / pi - log(pi_ref / pi) - 1, times the ratio.
    """
    old = LOGPS.detach() + torch.tensor([[0.1, -0.3, 0.4], [0.4, -0.3, 3.0]])
    ref = LOGPS.detach() + torch.tensor([[-0.2, 0.5, 0.1], [0.3, -0.4, -1.0]])
    advantages = torch.tensor([0.8, -0.5], dtype=torch.float64)
    far = ref.masked_fill(~MASK, 1000)
    calls = {
        "the policy has sampled": (None, torch.ones_like(MASK), {}),
        "an older policy has sampled": (old, torch.ones_like(MASK), {}),
        "the second completion is shorter": (old, MASK, {}),
        "the second completion has no tokens": (old, MASK & torch.tensor([[True], [False]]), {}),
        "epsilon_low is 0.1 and epsilon_high 0.35": (old, MASK, {"epsilon_low": 0.1, "epsilon_high": 0.35}),
        "beta is 0.3": (old, MASK, {"beta": 0.3, "ref_per_token_logps": ref}),
        "the sampler has -1000 at padding": (old.masked_fill(~MASK, -1000), MASK, {}),
        "the reference has 1000 at padding": (old, MASK, {"beta": 0.3, "ref_per_token_logps": far}),
    }
    for description, (old_per_token_logps, mask, options) in calls.items():
        loss = grpo_loss(LOGPS, advantages, mask, old_per_token_logps=old_per_token_logps, **options)
        yield description, {"the loss": loss.detach(), **gradients(loss, {"per_token_logps": LOGPS})}


@exercise(
    "dpo_loss",
    """
    Equation 7 needs log pi / pi_ref of whole answers, which is the sum over the tokens of the mask. F.logsigmoid is
    exact where the logarithm of a sigmoid is not. The loss is small when the chosen answer has gained more than the
    rejected one.
    """,
    {
        "you average over tokens; the log-probability of an answer is the sum":
            ("log_ratios.sum(-1)", "(log_ratios.sum(-1) / mask.sum(-1))"),
        "the sums include tokens after the end of an answer; multiply by the mask": (" * mask", ""),
        "the reference is missing": ("(per_token_logps - ref_per_token_logps)", "per_token_logps"),
        "you exchanged the chosen and the rejected answer": ("(chosen - rejected)", "(rejected - chosen)"),
        "beta is missing": ("beta * ", ""),
        "divide by nothing: beta is a factor": ("beta * (chosen - rejected)", "(chosen - rejected) / beta"),
        "your loss has the wrong sign": ("-F.logsigmoid", "F.logsigmoid"),
        "the logarithm of the sigmoid is missing": ("F.logsigmoid(", "torch.sigmoid("),
        "take the mean of the pairs, not their sum": (".mean()", ".sum()"),
        "the ratio is inverted; divide the policy by the reference":
            ("(per_token_logps - ref_per_token_logps)", "(ref_per_token_logps - per_token_logps)"),
        "your loss is 1 minus the sigmoid; take minus its logarithm":
            ("-F.logsigmoid(beta * (chosen - rejected))", "1 - torch.sigmoid(beta * (chosen - rejected))"),
        "beta multiplies the chosen answer alone": ("beta * (chosen - rejected)", "beta * chosen - rejected"),
        "your loss is a hinge, as in SLiC; take the logarithm of the sigmoid":
            ("-F.logsigmoid(beta * (chosen - rejected))", "F.relu(1 - beta * (chosen - rejected))"),
        "the rejected answer is missing": ("chosen - rejected", "chosen"),
        "the policy is detached, so the loss has no gradient":
            ("(per_token_logps - ref", "(per_token_logps.detach() - ref"),
    },
)  # fmt: skip
def _(dpo_loss):
    """
    Compute the mean loss of B pairs. The log-probabilities and the mask are (B, 2, T): the chosen answer of each pair,
    and then the rejected one.
    """
    ref = LOGPS.detach() - torch.tensor([[0.3, 0.6, -0.1], [0.2, -0.8, 1.0]])
    calls = {
        "the model equals the reference": (LOGPS.detach(), torch.ones_like(MASK)),
        "two answers of 3 tokens": (ref, torch.ones_like(MASK)),
        "the rejected answer is shorter": (ref, MASK),
        "beta is 0.5": (ref, MASK, 0.5),
    }
    for description, (reference, mask, *beta) in calls.items():
        options = {"beta": beta[0]} if beta else {}
        pairs = torch.stack([LOGPS, 2 * LOGPS.flip(1)])
        masks = torch.stack([mask, mask.flip(1)])
        loss = dpo_loss(pairs, masks, ref_per_token_logps=torch.stack([reference, reference.flip(1)]), **options)
        yield description, {"the loss": loss.detach(), **gradients(loss, {"per_token_logps": LOGPS})}
