"""The model and processor that a recipe asks for."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from minivlmrl.config.loading import asked_yaml
from minivlmrl.data.image_settings import RESIZE
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer, train_tokenizer
from minivlmrl.distributed.fsdp import Sharding, recompute_blocks
from minivlmrl.distributed.process_group import World
from minivlmrl.files import ASKED, read_json
from minivlmrl.generation.environments import prepare_tools
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import DTYPES, load_model, load_processor
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.trainable import select_trained
from minivlmrl.tasks.registry import get_task


def build_model(
    config, world: World, datasets: dict[str, Dataset] | None = None
) -> tuple[Qwen2_5_VL, Processor]:
    """Load the recipe's checkpoint, or make a random model with a tokenizer of the task or rows."""
    section = config.model
    if (section.path is None) == (section.config is None):
        raise ValueError("model: set either model.path (a folder) or model.config (random weights)")
    dtype = DTYPES[section.dtype]
    recompute = section.activation_checkpointing
    pixel_bounds = config.data.min_pixels, config.data.max_pixels
    sharding = None
    if config.uses_fsdp:
        compute_dtype = DTYPES.get(section.compute_dtype)
        sharding = Sharding(config.sharding, world, dtype, recompute, compute_dtype)
    adapt = None
    if config.adapter.r:
        from minivlmrl.model.lora import inject_adapters  # here, because few runs have adapters

        adapt = partial(inject_adapters, options=config.adapter)
    if section.path:
        processor = load_processor(section.path, *pixel_bounds)
        model = load_model(section.path, dtype, world.device, sharding, adapt)
    else:
        tokenizer = make_tokenizer(config, datasets)
        model, processor = random_model(section.config, tokenizer, config.seed, *pixel_bounds)
        model.to(world.device, dtype)
        if adapt is not None:
            adapt(model)
        if sharding is not None:
            sharding.shard(model)
    if adapt is not None:
        from minivlmrl.model.lora import draw_adapters

        draw_adapters(model, config.seed)
    if config.adapter.path:
        from minivlmrl.model.peft import begin_with

        begin_with(model, config.adapter.path)
    select_trained(model, section.freeze)
    if recompute and sharding is None:
        recompute_blocks(model)
    return model, adapt_processor(processor, config)


def make_tokenizer(config, datasets: dict[str, Dataset] | None) -> Tokenizer:
    """Take the tokenizer of the task, or train one on the rows, for random weights."""
    if config.data.task:
        return get_task(config.data.task).tokenizer()
    if not datasets:
        raise ValueError("model.config needs an embedded task or rows to train on; set model.path")
    path = config.model.config
    vocab_size = ModelConfig.from_dict(read_json(Path(path)), path).vocab_size
    return train_tokenizer(_texts(datasets), vocab_size)


def adapt_processor(processor: Processor, config) -> Processor:
    """Let a processor do what the recipe's data section asks for, and say so in its folder."""
    data = config.data
    image_processor = processor.image_processor
    if isinstance(data.resize, str):
        image_processor = replace(image_processor, resize=RESIZE[data.resize])
    template = processor.template
    if data.template:
        from minivlmrl.data.folder_template import with_values  # here, because it needs Jinja

        template = with_values(template, data.template)
    processor.tokenizer.files[ASKED] = asked_yaml(config).encode()
    processor = replace(
        processor,
        image_processor=image_processor,
        template=template,
        answer=data.answer,
        box_space=data.box_space or processor.box_space,
    )
    return prepare_tools(processor, config.sampling.environment)


def _texts(datasets: dict[str, Dataset]) -> Iterator[str]:
    """Yield what a tokenizer is trained on: questions and answers of 10,000 rows a stage."""
    yield "system\nYou are a helpful assistant.\nuser\nassistant\n<think></think><answer></answer>"
    for stage, rows in datasets.items():
        if stage == "eval":
            continue
        for row in islice(rows, 10_000):
            turns = list(row.messages)
            for answer in (row.completion, row.chosen, row.rejected):
                if answer:
                    turns += as_turns(answer)
            for turn in turns:
                yield text_of(turn)
            yield str(row.columns.get("solution") or "")
