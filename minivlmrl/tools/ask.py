"""`python -m minivlmrl ask`: ask a model one question; its answer appears on the terminal while it is written.

python -m minivlmrl ask --model FOLDER --image cat.jpg --prompt "How many cats are there?" --temperature 0
"""

import argparse
import codecs
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Collection

import torch

from minivlmrl.chat import Tokenizer
from minivlmrl.data.conversations import conversation
from minivlmrl.data.video import load_video
from minivlmrl.generate import generate
from minivlmrl.hub.checkpoint import DTYPES, check_fits, load_model, load_processor
from minivlmrl.hub.folder import find_folder, read_json
from minivlmrl.image import load_image
from minivlmrl.run.config import SamplingConfig
from minivlmrl.sampling.stop_strings import token_bytes


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2, and a line on stderr, for what the user has to change."""
    try:
        answer(parser().parse_args(arguments))
    except (ValueError, FloatingPointError) as error:
        print(f"python -m minivlmrl ask: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130  # as shells say it
    except BrokenPipeError:  # who reads it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would fail again
        return 141  # as shells say it
    return 0


def answer(options: argparse.Namespace):
    """Print what the model answers. The weights, which take longest to read, come last: mistakes show before."""
    params, generator = sampling(options), seeded_generator(options.device, options.seed)
    processor = load_processor(options.model, options.min_pixels, options.max_pixels)
    check_fits(options.model, processor)
    images = [load_image(source, allow_url=True) for source in options.image]  # who writes a URL here allows it
    videos = [load_video(source, allow_url=True) for source in options.video]
    media = {"image": len(images), "video": len(videos)}
    prompt = processor(conversation(options.prompt, media, system_prompt=options.system), images, videos)
    model = load_model(options.model, DTYPES.get(options.dtype), generator.device)
    stop = processor.stop_token_ids if params.stop_token_ids is None else params.stop_token_ids
    stream = Stream(processor.tokenizer, stop)
    [[completion]] = generate(model, [prompt], 1, params, stop, generator, processor.tokenizer, stream)
    stream.end()
    if not completion.stopped:
        print(f"(cut after {len(completion.ids)} tokens)", file=sys.stderr)


class Stream:
    """Prints tokens as they come, each character when its last byte is there, and no stop token.

    Args:
        stop_token_ids: these are not printed.
    """

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Collection[int]):
        self.tokenizer, self.stop_token_ids = tokenizer, stop_token_ids
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back a character's first bytes

    def __call__(self, rows: list[int], ids: list[int]):
        """Take the next token of the one row."""
        [token_id] = ids
        if token_id not in self.stop_token_ids:
            print(self.decoder.decode(token_bytes(self.tokenizer, token_id) or b""), end="", flush=True)

    def end(self):
        """Print what was held back: half a character, as the sign for one that cannot be read."""
        print(self.decoder.decode(b"", final=True))


def sampling(options: argparse.Namespace) -> SamplingConfig:
    """The sampling options that were given, on top of the model's own if these are asked for."""
    given = {name: value for name, value in vars(options).items() if name in typing.get_type_hints(SamplingConfig)}
    if not options.generation_config:
        return SamplingConfig(**given)
    file = find_folder(options.model) / "generation_config.json"
    return SamplingConfig.from_generation_config(read_json(file), **given)


def seeded_generator(device: str | None, seed: int) -> torch.Generator:
    """On the device that the model is to run on, by default the GPU where there is one."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.Generator(name).manual_seed(seed)
    except (RuntimeError, ValueError) as error:  # no such device, or too large a seed
        raise ValueError(f"--device {name} with --seed {seed} cannot be used ({str(error).splitlines()[0]})") from error


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m minivlmrl ask", description="Ask a model one question.", allow_abbrev=False
    )
    p.add_argument("--model", required=True, help="a Hugging Face folder, or the id of a repository")
    p.add_argument("--prompt", required=True, metavar="TEXT", help="<image> or <video> in it says where each goes")
    for kind in ("image", "video"):
        p.add_argument(f"--{kind}", action="append", default=[], metavar="FILE", help="or a URL; once for each")
    p.add_argument("--system", metavar="TEXT", help="in place of Qwen's system message")
    p.add_argument("--seed", type=int, default=0, help="of the draws; the same seed gives the same answer")
    p.add_argument("--device", help="by default cuda where there is one")
    p.add_argument("--dtype", choices=DTYPES, help="of the weights; by default the model's own")
    for bound in ("min_pixels", "max_pixels"):
        p.add_argument(f"--{bound}", type=int, help="bound of an image's area; by default the model's own")
    p.add_argument("--generation_config", action="store_true", help="begin with the model's generation_config.json")
    add_sampling_options(p.add_argument_group("sampling", SamplingConfig.__doc__))
    return p


def add_sampling_options(group: argparse._ArgumentGroup):
    """An option for each field of SamplingConfig; what it says about itself is the comment beside the field."""
    comments = dict(re.findall(r"^    (\w+): .+?  # (.+)$", inspect.getsource(SamplingConfig), re.MULTILINE))
    for name, kind in typing.get_type_hints(SamplingConfig).items():
        kind = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind  # int of int | None
        item = typing.get_args(kind)  # (str,) of list[str]
        group.add_argument(
            f"--{name}", type=item[0] if item else kind, nargs="*" if item else None, default=argparse.SUPPRESS,
            metavar=(item[0] if item else kind).__name__.upper(), help=comments[name].replace("%", "%%"),
        )  # fmt: skip
