"""Test that a trial of the largest batches before the first step changes no result of the run."""

from types import SimpleNamespace

import PIL.Image
import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import DataOptions, RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.sampler import Sampler
from minivlmrl.monitor.memory import estimate, largest_batch, memory_check, out_of_memory
from minivlmrl.run import loop
from minivlmrl.tasks import shapes
from minivlmrl.trainers.base import Trainer
from tests.helpers.runs import metrics, write_lines
from tests.helpers.stages import STAGE

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=14 * 14, max_pixels=56 * 56))
DROPOUT = ["--adapter.r=2", "--adapter.dropout=0.1"]
# {stage: (model, options)}
FORMS = {"sft": ("qwen3_vl_moe", DROPOUT), "grpo": ("qwen3_5_moe", ["--grpo.beta=0.1", "--grpo.num_generations=2"])}


sample = Sampler.sample_with


def copies(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", FORMS)
def test_a_trial_changes_nothing(stage, name, monkeypatch):
    model, options = FORMS[name]
    tried, plain = (stage(name, *options, model=model) for _ in range(2))
    batches = []
    original = Trainer.training_loss

    def training_loss(trainer, batch):
        batches.append(batch)
        torch.rand(1)  # a user's loss may use the global random generator
        return original(trainer, batch)

    before, random_state = copies(tried.trainer.trained), torch.get_rng_state()
    sizes = [RowSize(index=index) for index in range(8)]
    question = estimate.MemoryQuestion(tried.trainer.config, name, None, 1, sizes, sizes[:1])
    sampled = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_loss", training_loss)
        patch.setattr(Sampler, "sample_with", lambda sampler, *given: sampled.append(sample(sampler, *given)))
        datasets = {name: tried.batches.dataset, "eval": tried.batches.dataset}
        largest_batch.try_largest_batches(question, tried.trainer, tried.optimizer, datasets, 100)
    rows = range(STAGE["micro_batch_size"])
    assert len(batches) == 1 and len(batches[0].group.prompts) == len(rows)
    # the trial samples a rollout of 4 prompts, and 13 held-out rows, which fill a batch of 16,384 tokens
    shapes_of_batches = [(len(groups), {len(group) for group in groups}) for groups in sampled]
    rollout = [(4, {tried.options.num_generations})] if tried.trainer.samples_completions else []
    assert shapes_of_batches == [*rollout, (13, {1})]
    assert {len(completion.ids) for groups in sampled for group in groups for completion in group} == {1}
    if tried.trainer.samples_completions:
        config = tried.trainer.config
        lengths = batches[0].group.completion_mask.sum(1)
        assert lengths.tolist() == [config.sampling.max_new_tokens] * len(rows) * tried.options.num_generations
    assert all(value.equal(before[key]) for key, value in tried.trainer.trained.state_dict().items())
    assert all(parameter.grad is None for parameter in tried.trainer.trained.parameters())
    assert torch.get_rng_state().equal(random_state) and not tried.optimizer.state
    assert tried.go(2) == plain.go(2)
    after = copies(plain.trainer.trained)
    assert all(value.equal(after[key]) for key, value in tried.trainer.trained.state_dict().items())


class CheckedAsOnGPU(memory_check.MemoryCheck):
    """A memory check that plans for a GPU, although the run trains on the CPU."""

    def on_rows(self, config, datasets, processor, world):
        super().on_rows(config, datasets, processor, World(device=torch.device("cuda", 0)))


FILES = ["metrics.jsonl", "completions.jsonl", "checkpoint/model.safetensors"]


@pytest.fixture
def train(home, user_data, quick, varied_rollouts, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))

    def train(name, callbacks, *options):
        folder = tmp_path / name
        given = [*user_data, "--stages=[sft, grpo]", "--sft.max_steps=1", "--grpo.max_steps=1"]
        loop.run_training(load_config(home / "recipe.yaml", [*given, f"--output_dir={folder}", *options]), callbacks)
        return {name: (folder / name).read_bytes() for name in FILES}

    return train


def test_memory_that_runs_out_is_reported_before_the_first_step(train, tmp_path, monkeypatch):
    """The error names the longest row of the data, which the first step may not contain."""
    lines = [{"problem": "a", "solution": "b"}] * 8
    lines[5] = {"problem": "long " * 40, "solution": "b"}
    write_lines(tmp_path / "rows.jsonl", lines)

    def training_loss(trainer, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Trainer, "training_loss", training_loss)
    monkeypatch.setattr(loop, "optimizer_step", None)  # a call of None would fail
    with pytest.raises(out_of_memory.OutOfMemory) as caught:
        given = f"--data.train_file={tmp_path / 'rows.jsonl'}"
        train("run", [out_of_memory.OutOfMemoryReport(), CheckedAsOnGPU()], "--stages=[grpo]", given)
    assert str(caught.value).startswith("grpo step 0, phase forward: memory ran out (CUDA out of memory.")
    assert "rows.jsonl:6 with" in str(caught.value) and metrics(tmp_path / "run") == []


def test_unreadable_rows_are_not_tried(write_rows, tmp_path):
    """With data.skip_unreadable, the largest readable rows are tried, and repeated if there are too few."""
    for name in ("broken", "large"):
        PIL.Image.effect_noise((64, 64), 90).save(tmp_path / f"{name}.png")
    broken = tmp_path / "broken.png"
    broken.write_bytes(broken.read_bytes()[:2000])
    data = FileDataset(write_rows(*({"problem": "a", "image": f"{name}.png"} for name in ("broken", "large", "red"))))
    sizes = memory_check.heaviest_rows(data, PROCESSOR)
    assert [size.index for size in sizes] == [0, 1, 2] and sizes[0].weight == sizes[1].weight > sizes[2].weight

    def rows_of(count, skips=True, sizes=sizes):
        question = estimate.MemoryQuestion(RunConfig(data=DataOptions(skip_unreadable=skips)), "grpo", None)
        rows = largest_batch.largest_rows(question, SimpleNamespace(processor=PROCESSOR), data, sizes, count)
        return [row.index for row in rows]

    assert rows_of(1) + rows_of(3) == [1, 1, 2, 1]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*broken\.png"):
        rows_of(1, skips=False)
    assert rows_of(1, sizes=sizes[:1]) == []
