"""Ask a model one question; its answer appears on the terminal while it is generated.

python -m minivlmrl ask --model FOLDER --image cat.jpg --prompt "How many cats are there?" --temperature 0
"""

import argparse
import codecs
import sys
import typing
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from minivlmrl.data.conversations import conversation
from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.video import load_video
from minivlmrl.generate import generate
from minivlmrl.hub.checker import build, help_of
from minivlmrl.hub.folder import find_folder, read_json
from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.sampling.filters import SamplingOptions
from minivlmrl.sampling.generation_config import from_generation_config
from minivlmrl.sampling.stop_strings import token_bytes, watch_stop_strings
from minivlmrl.scale.checkpoint import DTYPES, load_model, load_processor
from minivlmrl.scale.ranks import find_device


def main(arguments: list[str]):
    """Print the answer of a model. Its weights, which take longest to read, come last: mistakes show before."""
    options = parser().parse_args(arguments)
    params, device = sampling(options), seeded_device(options.device, options.seed)
    processor = load_processor(options.model, options.min_pixels, options.max_pixels)
    images = [fetch_image(source, allow_url="private") for source in options.image]  # a URL that you give is allowed
    videos = [load_video(source, allow_url="private") for source in options.video]
    messages = conversation(options.prompt, {"image": len(images), "video": len(videos)}, system_prompt=options.system)
    prompt = processor(messages, images, videos)
    model = load_model(options.model, DTYPES.get(options.dtype), device)
    stop = processor.stop_token_ids if params.stop_token_ids is None else params.stop_token_ids
    stream = Stream(processor.tokenizer, stop, watch_stop_strings(params, processor.tokenizer, [prompt], 1))
    [[completion]] = generate(model, [prompt], 1, params, stop, watch=stream)
    stream.end()
    if not completion.stopped:
        print(f"(cut after {len(completion.ids)} tokens)", file=sys.stderr)


class Stream:
    """Print tokens as they are drawn, each character with its last byte, and no stop token."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Collection[int], ends: Callable | None = None):
        # ends: which rows have completed a stop string, see watch_stop_strings; None without such strings
        self.tokenizer, self.stop_token_ids, self.ends = tokenizer, stop_token_ids, ends
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the first bytes of a character

    def __call__(self, rows: Tensor, ids: Tensor) -> Tensor | bool:
        """Take the next token of the only row, (1,); returns whether a stop string ends with it."""
        [token_id] = ids.tolist()
        if token_id not in self.stop_token_ids:
            print(self.decoder.decode(token_bytes(self.tokenizer, token_id) or b""), end="", flush=True)
        return self.ends is not None and self.ends(rows, ids)

    def end(self):
        """End the line; an incomplete character is printed as the replacement character."""
        print(self.decoder.decode(b"", final=True))


def sampling(options: argparse.Namespace) -> SamplingOptions:
    """The sampling options that were given, on top of the model's own if --generation_config is given."""
    given = {name: value for name, value in vars(options).items() if name in typing.get_type_hints(SamplingOptions)}
    if not options.generation_config:
        return build(SamplingOptions, given, "command line")
    return from_generation_config(read_json(find_folder(options.model) / "generation_config.json"), **given)


def seeded_device(device: str | None, seed: int) -> torch.device:
    """The device that the model runs on, by default the GPU if there is one; draws on it begin with the seed."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training, see ranks.setup
    name = device or find_device()
    try:
        torch.manual_seed(seed)
        return torch.empty(0, device=name).device
    except (RuntimeError, ValueError, AssertionError) as error:  # no such device, or too large a seed
        raise ValueError(f"--device {name} with --seed {seed} cannot be used ({str(error).splitlines()[0]})") from error


def parser() -> argparse.ArgumentParser:
    """The command line: what to ask, and one option for each field of SamplingOptions with the field's comment."""
    p = argparse.ArgumentParser(prog="python -m minivlmrl ask", description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--model", required=True, help="a Hugging Face folder, or the id of a repository")
    p.add_argument("--prompt", required=True, metavar="TEXT", help="<image> or <video> in it: where each belongs")
    for kind in ("image", "video"):
        p.add_argument(f"--{kind}", action="append", default=[], metavar="FILE", help="or a URL; may be given again")
    p.add_argument("--system", metavar="TEXT", help="instead of Qwen's system message")
    p.add_argument("--seed", type=int, default=0, help="of the draws; the same seed gives the same answer")
    p.add_argument("--device", help="by default cuda if there is one")
    p.add_argument("--dtype", choices=DTYPES, help="of the weights; by default the model's own")
    for bound in ("min_pixels", "max_pixels"):
        p.add_argument(f"--{bound}", type=int, help="bound of an image's area; by default the model's own")
    p.add_argument("--generation_config", action="store_true", help="begin with the model's generation_config.json")
    group, sentences = p.add_argument_group("sampling", SamplingOptions.__doc__), help_of(SamplingOptions)
    for name, hint in typing.get_type_hints(SamplingOptions).items():
        kind, nargs, text = hint, None, sentences[name].replace("%", "%%")
        while inside := typing.get_args(kind):  # int of int | None, str of list[str]
            nargs = "*" if typing.get_origin(kind) is list else nargs
            kind = str if isinstance(inside[0], str) else inside[0]
        metavar = kind.__name__.upper()
        group.add_argument(f"--{name}", type=kind, nargs=nargs, metavar=metavar, default=argparse.SUPPRESS, help=text)
    return p
