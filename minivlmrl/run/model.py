"""The model and processor that a recipe asks for."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from torch import nn

from minivlmrl.adapters.lora import draw_adapters
from minivlmrl.adapters.peft_folder import begin_with
from minivlmrl.adapters.trained import select_trained
from minivlmrl.data.template import with_values
from minivlmrl.data.turns import as_turns, text_of
from minivlmrl.environments.environment import with_tools
from minivlmrl.hub.folder import ASKED, read_json
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.hub.preprocessor import RESIZE
from minivlmrl.hub.tokenizer import train_tokenizer
from minivlmrl.rows import Dataset, Processor
from minivlmrl.run.config import asked_yaml
from minivlmrl.scale.checkpoint import DTYPES, load_model, load_processor, random_model
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import Sharding, recompute_blocks
from minivlmrl.tasks.task import get_task


def build_model(
    config, world: World, datasets: dict[str, Dataset] | None = None
) -> tuple[nn.Module, Processor]:
    """Load the recipe's checkpoint, or make a random model with a tokenizer of the task or rows."""
    section, data, sharding = config.model, config.data, None
    if (section.path is None) == (section.config is None):
        raise ValueError("model: set either model.path (a folder) or model.config (random weights)")
    dtype = DTYPES[section.dtype]
    recompute = section.activation_checkpointing
    bounds = data.min_pixels, data.max_pixels
    if config.uses_fsdp:
        computed = DTYPES.get(section.compute_dtype)
        sharding = Sharding(config.sharding, world, dtype, recompute, computed)
    if section.path:
        processor = load_processor(section.path, *bounds)
        model = load_model(section.path, dtype, world.device, sharding, config.adapter.place)
    elif data.task is None and not datasets:
        raise ValueError("model.config needs an embedded task or rows to train on; set model.path")
    else:
        if data.task:
            tokenizer = get_task(data.task).tokenizer()
        else:
            values = read_json(Path(section.config))
            size = ModelConfig.from_dict(values, section.config).vocab_size
            tokenizer = train_tokenizer(_texts(datasets), size)
        model, processor = random_model(section.config, tokenizer, config.seed, *bounds)
        config.adapter.place(model.to(world.device, dtype))
        if sharding is not None:
            sharding.shard(model)
    draw_adapters(model, config.seed)
    if config.adapter.path:
        begin_with(model, config.adapter.path)
    select_trained(model, section.freeze)
    if recompute and sharding is None:
        recompute_blocks(model)
    images = processor.image_processor
    if isinstance(data.resize, str):
        images = replace(images, resize=RESIZE[data.resize])
    processor.tokenizer.files[ASKED] = asked_yaml(config).encode()
    space = data.box_space or processor.box_space
    options = {"image_processor": images, "answer": data.answer, "box_space": space}
    options["template"] = with_values(processor.template, data.template)
    return model, with_tools(replace(processor, **options), config.sampling.environment)


def _texts(datasets: dict[str, Dataset]) -> Iterator[str]:
    """Yield what a tokenizer is trained on: questions and answers of 10,000 rows a stage."""
    yield "system\nYou are a helpful assistant.\nuser\nassistant\n<think></think><answer></answer>"
    for rows in (rows for stage, rows in datasets.items() if stage != "eval"):
        for row in islice(rows, 10_000):
            answers = filter(None, (row.completion, row.chosen, row.rejected))
            for turn in chain(row.messages, *map(as_turns, answers)):
                yield text_of(turn)
            yield str(row.columns.get("solution") or "")
