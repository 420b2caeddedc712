"""Check docs/coming_from.md: its options exist, and losses and formats of other projects are as the page says."""

import dataclasses
import functools
import inspect
import re
import runpy

import PIL.Image
import pytest

from minivlmrl.commands.train import train_recipe
from minivlmrl.config import loading, options, parsing
from minivlmrl.distributed.saving import save_model
from minivlmrl.losses.grpo import grpo_loss
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes
from tests.helpers.by_hand import loss_options
from tests.helpers.links import ROOT, blocks, rows_of
from tests.helpers.runs import metrics

PAGE = (ROOT / "docs" / "coming_from.md").read_text()


@pytest.mark.parametrize("name", [
    "rec_qwen2_5_vl_3b", "rec_qwen2_5_vl_3b_one_card", "rec_qwen3_vl_4b_one_card", "cls_qwen2_vl_2b",
])  # fmt: skip
def test_recipes_have_the_loss_of_their_source(name):
    """Clipped ratios and 0.04 times k3, averaged over each completion, then over completions."""
    config = loading.load_config(f"{name}.yaml").grpo
    assert (config.adam_beta2, config.lr_scheduler_type) == (0.999, "linear")
    assert loss_options(config, grpo_loss) == {
        "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "beta": 0.04, "kl_estimator": "k3", "use_bias_correction_kl": False,
    }  # fmt: skip


def names_here(theirs: str, ours: str) -> list[str]:
    """Return the options in our cell of a table row; `grpo.*` stands for the names in the cell of the other project."""
    names = re.findall("`([^`]+)`", ours)
    if names and names[0].endswith("*"):
        return [names[0][:-1] + name for name in re.findall("`([^`]+)`", theirs)]
    return names


def test_options_exist():
    """Names in the second column of a table, and names such as `section.option`, are options."""
    sources = "TRL", "VLM-R1 and ms-swift", "EasyR1 and verl"
    tables = [row for name in sources for row in rows_of(PAGE, f"From {name}")]
    known = {option.path for option in parsing.options_of(options.RunConfig)}
    sections = {path.partition(".")[0] for path in known if "." in path}
    ours = {name for name in set(re.findall(r"`(\w+\.\w+)`", PAGE)) if name.partition(".")[0] in sections}
    ours |= {name for theirs, cell, _ in tables for name in names_here(theirs, cell)}
    assert len(ours) > 40 and ours <= known


@pytest.mark.parametrize("row", rows_of(PAGE, "From TRL"), ids=lambda row: row[0])
def test_options_of_trl_exist_in_trl_and_defaults_marked_same_are_equal(trl, row):
    kinds = trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments, trl.DPOConfig, trl.KTOConfig, trl.RewardConfig
    known = {field.name: field for kind in reversed(kinds) for field in dataclasses.fields(kind)}
    theirs, ours = re.findall("`([^`]+)`", row[0]), names_here(*row[:2])
    assert {*theirs} <= {*known, *inspect.signature(trl.GRPOTrainer).parameters}
    if row[2].startswith("same"):
        defaults = [known[name].default for name in theirs]
        here = [functools.reduce(getattr, name.split("."), options.RunConfig()) for name in ours]
        assert defaults == (here if len(here) == len(theirs) else list(*here))


def test_the_trl_script_and_its_recipe_are_equivalent(trl, tmp_path, monkeypatch):
    [script] = [code for code in blocks(PAGE, "python") if "GRPOTrainer" in code]
    [recipe] = [code for code in blocks(PAGE, "yaml") if "counts.py" in code]
    [line] = re.findall(r"`(\{\"image\".*?\})`", PAGE)
    monkeypatch.chdir(tmp_path)
    for name, text in (("counts.py", script), ("counts.yaml", recipe), ("train.jsonl", line)):
        (tmp_path / name).write_text(text)
    PIL.Image.new("RGB", (80, 60), "red").save("a.png")
    seen = []
    signature = inspect.signature(trl.GRPOTrainer)

    class Trainer:
        def __init__(self, **arguments):
            seen.append(signature.bind(**arguments).arguments)

        def train(self):
            rows = seen[0]["train_dataset"]
            assert rows[0]["image"].size == (80, 60) and rows[0]["prompt"][0]["role"] == "user"

    monkeypatch.setattr(trl, "GRPOTrainer", Trainer)
    monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, use_cpu=True))
    runpy.run_path("counts.py", run_name="__main__")
    [theirs] = seen
    model, processor = random_model(ROOT / "recipes" / "shapes_model.json", shapes.tokenizer(), seed=0)
    save_model(tmp_path / "model", model, processor)
    ours = loading.load_config("counts.yaml")
    arguments = theirs["args"]
    prompts = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps // arguments.num_generations
    assert (ours.model.path, ours.output_dir) == (theirs["model"], arguments.output_dir)
    assert ours.grpo.prompts_per_step == prompts
    assert ours.state_steps == arguments.save_steps and not ours.save_steps  # both runs can be resumed
    for name in ("max_steps", "learning_rate", "num_generations", "beta"):
        assert getattr(ours.grpo, name) == getattr(arguments, name)
    small = ["--model.path=model", "--grpo.max_steps=1", "--grpo.prompts_per_step=1", "--sampling.max_new_tokens=4"]
    assert train_recipe(["counts.yaml", *small, "--num_threads=1"]) == 0
    [logged] = metrics(tmp_path / "runs" / "counts")
    assert logged["rewards/counts.py:exact/mean"] == 0.0
    trained = ["model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.35.self_attn.v_proj"]
    assert all(re.fullmatch(ours.adapter.target[0], name) for name in trained)
