"""Send a model one prompt, and print the answer while it is generated.

minivlmrl chat --model FOLDER --image cat.jpg --prompt "How many cats?" --sampling.temperature=0
"""

import argparse
import codecs
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import as_overrides, load_config, read_section, trained_quantization
from minivlmrl.config.options import DataOptions, RunConfig
from minivlmrl.config.types import Plain
from minivlmrl.data.download import find_folder
from minivlmrl.data.file_dataset import load_videos
from minivlmrl.data.media import fetch_image, place_media, read_media
from minivlmrl.data.messages import conversation
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Row
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.data.video import load_video
from minivlmrl.distributed import process_group
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import pluralize, truncate
from minivlmrl.extras.answers.evaluate import find_recipe
from minivlmrl.files import INFERENCE_CONFIG
from minivlmrl.generation.environments import make_sampler
from minivlmrl.generation.stop_strings import token_bytes
from minivlmrl.model.checkpoint import read_config
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.peft import adapter_options, base_model, find_adapter, is_adapter_folder
from minivlmrl.run.setup import build_model


def main(arguments: list[str]):
    options, overrides = build_parser().parse_known_args(arguments)
    config = inference_config(options, overrides)
    # open the images before loading weights, to report a wrong file name early
    row = build_row(options, config.data)
    world = process_group.setup(torch.get_num_threads(), config.timeout, config.uses_fsdp)
    model, processor = build_model(config, world)
    show = partial(print, end="", flush=True)
    completion = answer(model, processor, config, world, row, options.seed, show)
    print()
    if not completion.stopped:
        num_tokens = pluralize(len(completion.ids), "token")
        print(f"(the answer was cut off after {num_tokens}; raise --sampling.max_new_tokens)", file=sys.stderr)
    process_group.shutdown(world)


def answer(
    model: VisionLanguageModel, processor: Processor, config: RunConfig, world: World, row: Row, seed: int,
    show: Callable[[str], object],
) -> Completion:  # fmt: skip
    """Sample one answer, and pass its text to `show`, token by token."""
    prompt = row.prompt(processor)
    # no CUDA graph, because tokens are shown one by one
    sampling = replace(config.sampling, engine="native", cuda_graph="never")
    stop_ids = sampling.stop_token_ids or processor.stop_token_ids
    stream = Stream(processor.tokenizer, stop_ids, show)
    no_tokens = torch.empty(0, dtype=torch.long)
    show(processor.decode_assistant_turn(Completion(no_tokens)))  # shows "<think>" if the prompt ends with it
    sampler = make_sampler(model, processor, sampling, world)
    sampler.on_tokens = stream.write
    [[completion]] = sampler([prompt], 1, [f"ask/{seed}"])
    stream.end()
    return completion


def inference_config(options: argparse.Namespace, overrides: list[str]) -> RunConfig:
    """Build the configuration from the command line, and from the prompt and stop options saved with the model."""
    is_adapter = is_adapter_folder(options.model)
    path = base_model(options.model) if is_adapter else options.model
    dtype = read_config(find_folder(path)).torch_dtype
    folder = find_adapter(options.model) if is_adapter else find_folder(path)
    fields: dict[str, Plain] = {"stages": [], "sampling": {}, "model": {"path": path, "dtype": dtype}}
    recipe = folder / INFERENCE_CONFIG
    if recipe.is_file():
        saved = read_section(recipe, "sampling")
        names = ("stop_token_ids", "stop_strings")
        fields["sampling"] = {name: saved[name] for name in names if name in saved}
        config = load_config(recipe, [*as_overrides(fields), *overrides], is_found=True)
        text = truncate(config.data.prompt_template, 80)
        print(f"prompt template of {recipe}: {text}", file=sys.stderr)
    else:
        recipe = recipes_folder() / "own_data.yaml"
        defaults = as_overrides(fields | {"data": {}})
        config = load_config(recipe, [*defaults, *overrides])
    if is_adapter:
        config.adapter = adapter_options(options.model, trained_quantization(find_recipe(folder)))
    return config


def build_row(options: argparse.Namespace, data: DataOptions) -> Row:
    """Build a dataset row from the prompt, images and videos on the command line."""
    media_counts = {"image": len(options.image), "video": len(options.video)}
    template = data.prompt_template if "{problem}" in data.prompt_template else "{problem}"
    system_message = data.system_prompt if options.system is None else options.system
    turns = conversation(options.prompt, media_counts, template, system_message)
    files = read_media({"images": options.image, "videos": options.video})
    messages, media = place_media(turns, files, data)
    images = [fetch_image(item.sources[0]) for item in media if item.kind == "image"]
    return Row(messages, images, videos=load_videos(media, Path(), load_video))


class Stream:
    """Show an answer while it is sampled."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int], show: Callable[[str], object]):
        self.tokenizer = tokenizer
        self.hidden = hidden
        self.show = show
        # incremental, because a UTF-8 character may span several tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, rows: Tensor, ids: Tensor):
        """Show new tokens as text."""
        for token_id in ids.tolist():
            if token_id not in self.hidden:
                self.show(self.decoder.decode(token_bytes(self.tokenizer, token_id)))

    def end(self):
        """Show remaining bytes; an incomplete UTF-8 character becomes U+FFFD."""
        self.show(self.decoder.decode(b"", final=True))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "minivlmrl chat",
        description=str(__doc__).splitlines()[0],
        epilog="--section.name=value sets an option of a recipe, as in --sampling.temperature=0",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of the model, or its repository id on the Hub")
    add("--prompt", required=True, help="text of the prompt; each <image> is replaced by an image")
    media_option = {"action": "append", "default": [], "metavar": "FILE"}
    add("--image", **media_option, help="image file; repeat the option for several images")
    add("--video", **media_option, help="video file; repeat the option for several videos")
    add("--system", help="system message; defaults to that of the model's run or chat template")
    add("--seed", type=int, default=0, help="random seed of the answer; defaults to 0")
    return parser
