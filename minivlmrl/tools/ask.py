"""Ask a model one question; its answer appears on the terminal while it is generated.

python -m minivlmrl ask --model FOLDER --image cat.jpg --prompt "How many cats?" --temperature 0
"""

import argparse
import codecs
import sys
import typing
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minivlmrl.data.conversations import conversation
from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.template import with_values
from minivlmrl.data.video import VideoFile, load_video
from minivlmrl.environments.environment import with_tools
from minivlmrl.environments.tool_sampler import build_sampler
from minivlmrl.hub.folder import ASKED, find_folder
from minivlmrl.hub.recipe_values import build, help_of
from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.rows import Completion, Row
from minivlmrl.run.batches import DataSection
from minivlmrl.run.config import load_config
from minivlmrl.sampling.filters import SamplingOptions
from minivlmrl.sampling.stop_strings import token_bytes
from minivlmrl.scale.checkpoint import DTYPES, load_model, load_processor
from minivlmrl.scale.ranks import World, find_device


def main(arguments: list[str]):
    """Print the answer of a model. Its weights are read last: mistakes show before."""
    options = parser().parse_args(arguments)
    params = sampling(options)
    device = choose_device(options.device)
    processor = load_processor(options.model, options.min_pixels, options.max_pixels)
    images = [fetch_image(source) for source in options.image]
    videos = [VideoFile(partial(load_video, source)) for source in options.video]
    data = DataSection()
    asked = find_folder(options.model) / ASKED
    if asked.is_file():  # as the run that trained it
        data = load_config(asked).data
        print(f"asked as {asked} says: {data.prompt_template!r:.80}", file=sys.stderr)
    count = {"image": len(images), "video": len(videos)}
    system = options.system
    template = data.prompt_template if "{problem}" in data.prompt_template else "{problem}"
    system = data.system_prompt if system is None else system
    processor = replace(processor, template=with_values(processor.template, data.template))
    processor = with_tools(processor, params.environment)
    messages = conversation(options.prompt, count, template, system)
    prompt = Row(messages, images, videos=videos).prompt(processor)
    model = load_model(options.model, DTYPES.get(options.dtype), device)
    hidden = processor.stop_token_ids if params.stop_token_ids is None else params.stop_token_ids
    stream = Stream(processor.tokenizer, hidden)
    print(processor.turn(Completion(torch.empty(0, dtype=torch.long))), end="")
    params.graph = "never"  # each token is printed when it is there
    sampler = build_sampler(model, processor, params, World(device=device), listen=stream.hear)
    [[completion]] = sampler([prompt], 1, [f"ask/{options.seed}"])
    stream.end()
    if not completion.stopped:
        print(f"(cut after {len(completion.ids)} tokens)", file=sys.stderr)


class Stream:
    """Prints the tokens of the only row, a character with its last byte."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = ()):
        self.tokenizer, self.hidden = tokenizer, hidden
        # keeps the first bytes of a character
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def hear(self, rows: Tensor, ids: Tensor):
        """Print tokens (n,)."""
        for token_id in ids.tolist():
            if token_id not in self.hidden:
                text = token_bytes(self.tokenizer, token_id)
                print(self.decoder.decode(text), end="", flush=True)

    def end(self):
        """End the line; an incomplete character is printed as the replacement character."""
        print(self.decoder.decode(b"", final=True))


def sampling(options: argparse.Namespace) -> SamplingOptions:
    """Build the sampling options that the command line names."""
    fields = typing.get_type_hints(SamplingOptions)
    named = {name: value for name, value in vars(options).items() if name in fields}
    return build(SamplingOptions, named, "command line")


def choose_device(device: str | None) -> torch.device:
    """Find the device to run on, by default the GPU if there is one (ValueError: no such one)."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training, see ranks.setup
    name = device or find_device()
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used ({cause})") from error


def parser() -> argparse.ArgumentParser:
    """The command line: what to ask, and an option for each field of SamplingOptions."""
    about = {"description": __doc__.splitlines()[0], "allow_abbrev": False}
    p = argparse.ArgumentParser("python -m minivlmrl ask", **about)
    p.add_argument("--model", required=True, help="a folder, or an id on the hub")
    p.add_argument("--prompt", required=True, help="<image> in it: where each belongs")
    media = {"action": "append", "default": [], "metavar": "FILE"}
    p.add_argument("--image", **media, help="a picture, again for more")
    p.add_argument("--video", **media, help="again for more")
    p.add_argument("--system", help="instead of the family's system message")
    p.add_argument("--seed", type=int, default=0, help="same seed, same answer")
    p.add_argument("--device", help="default: cuda if there is one")
    p.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the model's")
    p.add_argument("--min_pixels", type=int, help="of an image; default: the model's")
    p.add_argument("--max_pixels", type=int, help="of an image; default: the model's")
    group = p.add_argument_group("sampling", SamplingOptions.__doc__)
    said = help_of(SamplingOptions)
    kinds = typing.get_type_hints(SamplingOptions)
    for name in (n for n in kinds if n not in ("engine", "vllm")):  # it draws itself
        kind = kinds[name]
        nargs = None
        while inside := typing.get_args(kind):  # int of int | None, str of list[str]
            nargs = "*" if typing.get_origin(kind) is list else nargs
            kind = str if isinstance(inside[0], str) else inside[0]
        given = {"type": kind, "nargs": nargs, "metavar": kind.__name__.upper()}
        sentence = said[name].replace("%", "%%")
        group.add_argument(f"--{name}", **given, default=argparse.SUPPRESS, help=sentence)
    return p
