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
from pathlib import Path

import torch
from torch import Tensor

from minivlmrl.data.conversations import conversation
from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.template import with_values
from minivlmrl.data.video import VideoFile, load_video
from minivlmrl.environments.environment import with_tools
from minivlmrl.environments.trajectories import build_sampler
from minivlmrl.hub.folder import ASKED, find_folder
from minivlmrl.hub.recipe_values import build, help_of
from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.rows import Completion, Row
from minivlmrl.run.batches import DataSection
from minivlmrl.run.config import load_config
from minivlmrl.sampling.filters import ENGINES, SamplingOptions
from minivlmrl.sampling.stop_strings import token_bytes
from minivlmrl.scale.checkpoint import DTYPES, load_model, load_processor
from minivlmrl.scale.ranks import World, find_device


def main(arguments: list[str]):
    """Print the answer of a model. Its weights are read last: mistakes show before."""
    options = build_parser().parse_args(arguments)
    sampling = sampling_options(options)
    sampling.graph = "never"  # each token is printed when it is there
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training, see ranks.setup
    world = World(device=find_device())
    processor = load_processor(options.model, options.min_pixels, options.max_pixels)
    data = data_section(find_folder(options.model) / ASKED)
    processor = replace(processor, template=with_values(processor.template, data.template))
    processor = with_tools(processor, sampling.environment)
    row = build_row(options, data)
    prompt = row.prompt(processor)
    model = load_model(options.model, DTYPES.get(options.dtype), world.device)
    if sampling.stop_token_ids is None:
        sampling.stop_token_ids = processor.stop_token_ids
    stream = Stream(processor.tokenizer, sampling.stop_token_ids)
    print(processor.turn(Completion(torch.empty(0, dtype=torch.long))), end="")
    sampler = build_sampler(model, processor, sampling, world, listen=stream.hear)
    [[completion]] = sampler([prompt], 1, [f"ask/{options.seed}"])
    stream.end()
    if not completion.stopped:
        print(f"(cut after {len(completion.ids)} tokens)", file=sys.stderr)


def data_section(file: Path) -> DataSection:
    """Read how the run that trained a model asked it, or take the defaults."""
    if not file.is_file():
        return DataSection()
    data = load_config(file, ["--stages=[]"]).data
    print(f"asked as {file} says: {data.prompt_template!r:.80}", file=sys.stderr)
    return data


def build_row(options: argparse.Namespace, data: DataSection) -> Row:
    """Put the question and its pictures into the form of a row."""
    images = [fetch_image(source) for source in options.image]
    videos = [VideoFile(partial(load_video, source)) for source in options.video]
    media_counts = {"image": len(images), "video": len(videos)}
    template = data.prompt_template if "{problem}" in data.prompt_template else "{problem}"
    system_message = data.system_prompt if options.system is None else options.system
    messages = conversation(options.prompt, media_counts, template, system_message)
    return Row(messages, images, videos=videos)


class Stream:
    """Prints the tokens of the only row, a character with its last byte."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]):
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


def sampling_options(options: argparse.Namespace) -> SamplingOptions:
    """Build the sampling options that the command line names."""
    fields = typing.get_type_hints(SamplingOptions)
    given_values = {name: value for name, value in vars(options).items() if name in fields}
    return build(SamplingOptions, given_values, "command line")


def build_parser() -> argparse.ArgumentParser:
    """The command line: what to ask, and an option for each field of SamplingOptions."""
    parser = argparse.ArgumentParser(
        "python -m minivlmrl ask", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder, or an id on the hub")
    add("--prompt", required=True, help="<image> in it: where each belongs")
    media_option = {"action": "append", "default": [], "metavar": "FILE"}
    add("--image", **media_option, help="a picture, again for more")
    add("--video", **media_option, help="again for more")
    add("--system", help="instead of the family's system message")
    add("--seed", type=int, default=0, help="same seed, same answer")
    add("--dtype", choices=DTYPES, help="of the weights; default: the model's")
    add("--min_pixels", type=int, help="of an image; default: the model's")
    add("--max_pixels", type=int, help="of an image; default: the model's")
    group = parser.add_argument_group("sampling", SamplingOptions.__doc__)
    help_texts = help_of(SamplingOptions)
    for name, hint in typing.get_type_hints(SamplingOptions).items():
        if name not in ("engine", *ENGINES):  # it draws itself
            help_text = help_texts[name].replace("%", "%%")
            group.add_argument(
                f"--{name}", **value_of(hint), default=argparse.SUPPRESS, help=help_text
            )
    return parser


def value_of(hint) -> dict:
    """Say how argparse reads a field: int | None as one int, list[str] as several texts."""
    nargs = None
    while type_arguments := typing.get_args(hint):
        if typing.get_origin(hint) is list:
            nargs = "*"
        hint = str if isinstance(type_arguments[0], str) else type_arguments[0]
    return {"type": hint, "nargs": nargs, "metavar": hint.__name__.upper()}
