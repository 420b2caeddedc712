"""Build model, processor and datasets, and check them before the first step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import torch

from minivlmrl.config.loading import inference_yaml, trained_quantization
from minivlmrl.config.options import RunConfig
from minivlmrl.data.chat_template import with_values
from minivlmrl.data.download import find_folder
from minivlmrl.data.file_dataset import without_rows
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_sizes import long_rows
from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import recompute_blocks
from minivlmrl.errors import UserError, require
from minivlmrl.files import HEAD_FILE, INFERENCE_CONFIG, unchanged
from minivlmrl.generation.environments import agents
from minivlmrl.generation.sampler import find_engine
from minivlmrl.model.build import config_for, random_processor, random_weights, read_sizes
from minivlmrl.model.checkpoint import DTYPES, load_model, load_processor
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.trainable import select_trained
from minivlmrl.rewards.registry import held_out_rewards, required_columns, training_rewards
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.datasets import columns_read, load_datasets
from minivlmrl.run.metrics import find_tracker
from minivlmrl.run.optimizer import check_optimizer
from minivlmrl.tasks.registry import get_task
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.offline import PairTrainer
from minivlmrl.trainers.registry import find_trainer


def prepare(
    config: RunConfig, trainers: dict[str, type[Trainer]], world: World, callbacks: Sequence[Callback]
) -> tuple[VisionLanguageModel, Processor, dict[str, Dataset]]:
    """Check recipe and rows, and build model, processor and datasets."""
    # check device, disk and options
    for callback in callbacks:
        callback.on_setup(config, world)
    check_optimizer(config.optimizer)
    for name in config.report_to:
        find_tracker(name)  # fail early if a tracker is not installed
    for stage in config.stage_names:
        prompts = getattr(config, stage).prompts_per_step
        require(
            prompts % world.size == 0,
            f"{stage}.prompts_per_step",
            prompts,
            f"a multiple of {world.size}, the number of ranks",
        )

    # open the datasets, and build the processor
    needs = {stage: trainer.needs for stage, trainer in trainers.items()}
    datasets = load_datasets(
        config,
        needs,
        required_columns(training_rewards(config)),
        required_columns(held_out_rewards(config)),
        world,
        columns_read(config, trainers),
    )
    processor = build_processor(config, datasets)
    datasets = filter_long_rows(config, datasets, processor, world)
    limit_epochs(config, datasets)
    for callback in callbacks:
        callback.on_rows(config, datasets, processor, world)

    # load weights
    model = build_weights(config, world, processor)
    for callback in callbacks:
        callback.on_model(config, datasets, model, processor, world)
    world.run_on_rank_zero(partial(check_positions, config, needs, datasets, model, processor))
    return model, processor, datasets


def build_model(config: RunConfig, world: World) -> tuple[VisionLanguageModel, Processor]:
    with unchanged(*filter(None, (config.model.path, config.adapter.path))):
        processor = build_processor(config)
        return build_weights(config, world, processor), processor


def build_processor(config: RunConfig, datasets: dict[str, Dataset] | None = None) -> Processor:
    """Load the model folder's processor, or build one for random weights."""
    section = config.model
    pixel_bounds = config.data.min_pixels, config.data.max_pixels
    if (section.path is None) == (section.config is None):
        raise UserError(
            "model: set exactly one of model.path (a model folder) and model.config (a config.json for random weights) "
            "and set the other one to null"
        )
    if section.path is not None:
        if (find_folder(section.path) / HEAD_FILE).is_file():
            raise UserError(
                f"{section.path} is a reward model or critic (it contains {HEAD_FILE}), which writes no answers; "
                "choose the model that it was trained from, or set reward_model.path or ppo.critic_path"
            )
        processor = load_processor(section.path, *pixel_bounds)
    else:
        assert section.config is not None
        if config.data.task:
            tokenizer = get_task(config.data.task).tokenizer()
        elif datasets:
            tokenizer = train_tokenizer(tokenizer_texts(datasets), read_sizes(section.config).vocab_size)
        else:
            raise UserError(
                "model.config needs the tokenizer of a built-in task, or rows to train a tokenizer on; "
                "set data.task, or set model.path to use a checkpoint instead"
            )
        model_config = config_for(section.config, tokenizer)
        processor = random_processor(model_config, tokenizer, *pixel_bounds)
    return adapt_processor(processor, config)


def build_weights(config: RunConfig, world: World, processor: Processor) -> VisionLanguageModel:
    """Load or initialize the model, add adapters, and shard it."""
    section = config.model
    dtype = DTYPES[section.dtype]
    sharding = None
    if config.uses_fsdp:
        # import FSDP only if needed: it takes 40 MiB and half a second
        from minivlmrl.distributed.fsdp import Sharding

        sharding = Sharding(
            config.sharding, world, dtype, section.activation_checkpointing,
            section.compute_dtype and DTYPES[section.compute_dtype],
        )  # fmt: skip
    adapt = None
    if config.adapter.r:
        from minivlmrl.model.lora import inject_adapters

        adapt = partial(inject_adapters, options=config.adapter)
    if section.path is not None:
        model = load_model(section.path, dtype, world.device, sharding, adapt)
    else:
        assert section.config is not None, "build_processor rejects a recipe without a model"
        model = random_weights(section.config, processor.tokenizer, config.seed)
        model.to(world.device, dtype)
        if adapt is not None:
            adapt(model)
        if sharding is not None:
            sharding.shard(model)
    if adapt is not None:
        from minivlmrl.model.lora import init_adapters

        init_adapters(model, config.seed)
    if config.adapter.path:
        from minivlmrl.model.peft import find_adapter, load_adapter_weights

        load_adapter_weights(model, config.adapter.path)
        quantize = trained_quantization(find_adapter(config.adapter.path) / INFERENCE_CONFIG)
        if world.is_main and quantize and not config.adapter.quantize:
            print(
                f"{config.adapter.path} was trained on {quantize} weights; set adapter.quantize={quantize}", flush=True
            )
    save_dtype = section.save_dtype or (section.path and model.config.torch_dtype)
    model.save_dtype = DTYPES[save_dtype] if save_dtype else None
    select_trained(model, section.freeze)
    if section.activation_checkpointing and sharding is None:
        recompute_blocks(model)
    return model


def adapt_processor(processor: Processor, config: RunConfig) -> Processor:
    """Return a processor with the options in the recipe section `data`, and with the environment's tools."""
    data = config.data
    processor.tokenizer.files[INFERENCE_CONFIG] = inference_yaml(config).encode()
    processor = replace(
        processor,
        image_processor=replace(processor.image_processor, dtype=patch_dtype(config)),
        template=with_values(processor.template, data.chat_template_kwargs),
        answer_format=data.answer_format,
        box_space=data.box_space or processor.box_space,
        end_token_ids=[*processor.end_token_ids, *(config.sampling.stop_token_ids or ())],
        sizes={"image": data.image, "video": data.video},
    )
    environment = config.sampling.environment
    return processor if environment is None else agents().with_tools(processor, environment)


def patch_dtype(config: RunConfig) -> torch.dtype:
    """Return the image patch dtype: the model dtype if 16-bit, else float32."""
    dtype = DTYPES[config.model.compute_dtype or config.model.dtype]
    return dtype if dtype.itemsize == 2 else torch.float32


def tokenizer_texts(datasets: dict[str, Dataset]) -> Iterator[str]:
    """Yield texts for training a tokenizer: prompts and answers from 10,000 rows per stage."""
    yield "system\nYou are a helpful assistant.\nuser\nassistant\n<think></think><answer></answer>"
    for stage, rows in datasets.items():
        if stage == "eval":
            continue
        for row in islice(rows, 10_000):
            answers = filter(None, (row.completion, row.chosen, row.rejected))
            yield from map(text_of, chain(row.messages, *map(as_turns, answers)))
            yield str(row.columns.get("solution") or "")


def answers_of(config: RunConfig, name: str) -> tuple[str, ...]:
    """Return the names of a dataset's answer columns, such as ("chosen", "rejected")."""
    trainers = {stage: find_trainer(stage, config) for stage in config.stage_names}
    if name in trainers:
        return trainers[name].answers
    return PairTrainer.answers if {trainer.needs for trainer in trainers.values()} == {"pairs"} else ()


def check_positions(
    config: RunConfig,
    needs: dict[str, str],
    datasets: dict[str, Dataset],
    model: VisionLanguageModel,
    processor: Processor,
):
    """Raise UserError if a row's prompt and answer are too long for the model or the sampling engine."""
    max_positions = model.config.max_position_embeddings
    engine_limit = find_engine(config.sampling).most_tokens(config.sampling) or max_positions
    for name, rows in datasets.items():
        answers = answers_of(config, name)
        is_answered = needs.get(name, "prompts") == "prompts" and not answers
        num_new = config.sampling.max_new_tokens if is_answered else 0
        most_tokens = max_positions
        bound = f"the model's {max_positions} (max_position_embeddings)"
        # the engine's limit applies only to training rows, because evaluations use the built-in sampler
        if needs.get(name) == "prompts" and engine_limit < max_positions:
            most_tokens = engine_limit
            bound = f"the limit of {engine_limit} tokens of sampling.engine"
        require(num_new < most_tokens, "sampling.max_new_tokens", num_new, f"less than {bound}")
        limit = most_tokens - num_new
        for size in long_rows(rows, processor, limit, config.data.skip_unreadable and name != "eval", answers):
            advice = "lower sampling.max_new_tokens, or " if num_new else ""
            raise UserError(
                f"{size.where}: {size.longest} tokens of prompt and answer, and {num_new} to sample, exceed {bound}; "
                f"{advice}shorten or remove the row, or skip it in training with data.max_prompt_tokens={limit}"
            )


def filter_long_rows(
    config: RunConfig, datasets: dict[str, Dataset], processor: Processor, world: World
) -> dict[str, Dataset]:
    """Remove training rows with more than data.max_prompt_tokens tokens in prompt and answers."""
    max_tokens = config.data.max_prompt_tokens
    if max_tokens is None:
        return datasets
    fitted = {**datasets}
    for name, rows in datasets.items():
        if name == "eval":  # remove no held-out rows, so that evaluations stay comparable
            continue
        long = long_rows(rows, processor, max_tokens, config.data.skip_unreadable, answers_of(config, name))
        removed = world.compute_on_rank_zero(partial(list, long))
        fitted[name] = without_rows(rows, {size.index for size in removed})
        if removed and world.is_main:
            examples = ", ".join(f"{size.where}: {size.longest} tokens" for size in removed[:5])
            print(f"rows of {name}: {len(removed)} over data.max_prompt_tokens are left out: {examples}", flush=True)
    return fitted


def limit_epochs(config: RunConfig, datasets: dict[str, Dataset]):
    """Lower max_steps if max_epochs gives fewer steps; config.yaml shows the lower value."""
    max_epochs = config.max_epochs or math.inf
    for stage in config.stage_names:
        section = getattr(config, stage)
        num_steps = max_epochs * len(datasets[stage]) * section.num_iterations / section.prompts_per_step
        section.max_steps = math.ceil(min(num_steps, section.max_steps))
