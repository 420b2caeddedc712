"""Test that recipes and overrides set options, and that errors name wrong values."""

import json
import math
import os
import re
import shutil
import typing
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import differing_options, load_config, to_yaml
from minivlmrl.config.options import FileOptions, GRPOOptions, RunConfig, SFTOptions, VideoOptions
from minivlmrl.config.parsing import options_of, read_value
from minivlmrl.config.types import Finite
from minivlmrl.extras.agents.environment import Settings
from minivlmrl.extras.vllm import VLLMOptions
from minivlmrl.monitor.check.preflight import collect_notes
from minivlmrl.trainers.registry import find_trainers
from tests.helpers.links import ROOT


@pytest.fixture
def write(tmp_path):
    def write(content, name="recipe.yaml"):
        (tmp_path / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return tmp_path / name

    return write


@pytest.fixture
def recipe(write):
    return write({"seed": 3, "grpo": {"num_generations": 4}})


def test_a_recipe_goes_over_the_defaults_and_overrides_over_it(write, recipe):
    """The command line may set an option twice; the last value counts."""
    assert load_config(recipe) == RunConfig(seed=3, grpo=GRPOOptions(num_generations=4))
    config = load_config(recipe, ["--seed=5", "--grpo.beta=0.5", "--grpo.beta=0.25"])
    assert (config.seed, config.grpo.beta, config.grpo.num_generations) == (5, 0.25, 4)
    assert load_config(write("{}")) == RunConfig()
    assert load_config(write({"seed": "many"}), ["--seed=5"]).seed == 5
    rewards = write({"rewards": {"format": 0.5, "accuracy": 1.0}})
    assert load_config(rewards, ["--rewards.accuracy=3"]).rewards == {"format": 0.5, "accuracy": 3.0}


def test_removed_options_name_their_successors(write, capsys):
    """config.yaml of earlier runs has the old names."""
    for option in ("checkpoint_steps", "checkpoint_minutes"):
        with pytest.raises(
            ValueError, match=f"{option} was removed. Instead: `{option.replace('checkpoint', 'state')}`"
        ):
            load_config(write({option: 7}))
    # removed options of a recipe that an earlier version wrote are left out, and named
    path = write({"seed": 5, "data": {"gone": 1}, "also_gone": 2})
    assert load_config(path, is_found=True).seed == 5
    assert "no longer the options also_gone, data.gone, and ignores them" in capsys.readouterr().err


def test_a_flag_needs_no_value_and_a_value_may_follow_after_a_space(recipe):
    given = ["--data.train_file", "a.jsonl", "--dpo.reference_free", "--seed", "-1", "--check_memory=false"]
    config = load_config(recipe, [*given, "--grpo.beta=0.5"])
    assert (config.data.train_file, config.seed, config.grpo.beta) == ("a.jsonl", -1, 0.5)
    assert config.dpo.reference_free is True and config.check_memory is False


BOUNDED = [  # (path, type, value that the option must refuse) of every option with a bound or a choice
    (option.path, option.hint, -1 if typing.get_origin(part) is typing.Annotated else "nonsense")
    for option in options_of(RunConfig)
    for part in (option.hint, *typing.get_args(option.hint))
    if part != Finite and typing.get_origin(part) in (typing.Annotated, typing.Literal)
]


@pytest.mark.parametrize(("path", "hint", "wrong"), [case for case in BOUNDED if case[0] != "sampling.stop_token_ids"])
def test_every_declared_bound_and_choice_holds(path, hint, wrong):
    with pytest.raises(ValueError, match=rf"^{path} is \[?'?{wrong}(\.0)?'?\]?, .*(it must be|known are)"):
        read_value(hint, wrong, path, json=False)


# options that accept infinity, which disables a clip or a check
INFINITE = {
    "optimizer.max_grad_norm", "rollout.max_logp_mismatch", "grpo.epsilon_low", "grpo.epsilon_high", "ppo.cliprange"
}  # fmt: skip


def test_only_a_few_options_take_an_infinite_number():
    options = [option for cls in (RunConfig, Settings, FileOptions, VideoOptions) for option in options_of(cls)]
    found = {option.path: option.hint for option in options if "inf]" in str(option.hint)}
    assert found.keys() == INFINITE
    assert all(read_value(hint, math.inf, path, json=False) == math.inf for path, hint in found.items())


@pytest.mark.parametrize("text", ["{problem}", "{problem} Think.", "[a", "3", "yes", "'{problem}'", "null", "a: b"])
def test_a_field_of_text_takes_the_command_line_as_it_is(recipe, text):
    """A text on the command line is parsed as YAML only if the text is null or in quotes."""
    expected = {"'{problem}'": "{problem}", "null": None}.get(text, text)
    assert load_config(recipe, [f"--data.system_prompt={text}"]).data.system_prompt == expected


@pytest.mark.parametrize(("have", "from_recipe", "from_command"), [
    ("", "there", "here"), ("here", "here", "here"), ("there", "there", "there"), ("here there", "there", "here"),
])  # fmt: skip
def test_code_lies_beside_the_recipe_or_here(write, tmp_path, monkeypatch, have, from_recipe, from_command):
    """Files of a recipe are first searched beside the recipe, and files of an override in the working folder."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        for file in ("own.py", "own.json") if name in have.split() else ():
            (tmp_path / name / file).touch()
    monkeypatch.chdir(tmp_path / "here")
    recipe = write({}, "there/recipe.yaml")
    for name in ("shapes", "package.module:TASK", None):
        assert load_config(recipe, [f"--data.task={name or 'null'}"]).data.task == name
    values = {"rewards": {"own.py:f(of='x/y')": 1.0}, "sampling": {"environment": "own.py:f(a='../b')"}}
    values |= {"data": {"eval_rewards": ["own.py:f", "format"], "task": "own.py:f"}, "model": {"config": "own.json"}}
    arguments = [f"--{name}={json.dumps(value)}" for name, value in values.items()]
    pairs = (load_config(write(values, "there/own.yaml")), from_recipe), (load_config(recipe, arguments), from_command)
    for config, folder in pairs:
        path = tmp_path / folder / "own"
        short = "own" if folder == "here" else str(path)  # the name of the reward in the metrics
        assert config.rewards == {f"{short}.py:f(of='x/y')": 1.0} and config.data.eval_rewards[0] == f"{short}.py:f"
        assert (config.data.task, config.model.config) == (f"{path}.py:f", f"{path}.json")
        assert config.sampling.environment == f"{path}.py:f(a='../b')"


def leaves(hint):
    if typing.get_origin(hint) is not Literal:
        yield from chain.from_iterable(map(leaves, typing.get_args(hint))) if typing.get_args(hint) else [hint]


def test_only_types_for_code_can_name_code():
    """Untyped values could name code, so only dataclasses and the sandbox of chat templates read them."""
    found = {option.path for option in options_of(RunConfig) if {dict, list, tuple, Any} & {*leaves(option.hint)}}
    assert found == {"data.image", "data.video", "data.chat_template_kwargs", "sampling.vllm"}
    types = {leaf for cls in (VideoOptions, VLLMOptions) for option in options_of(cls) for leaf in leaves(option.hint)}
    assert {leaf for leaf in types if isinstance(leaf, type)} == {int, float, bool, type(None)}


EVIL = "from pathlib import Path\n\nPath('ran').touch()\nraise SystemExit\n"


ATTACKS = [  # (folder of the run, working folder, recipe)
    ("run(1)", ".", {"rewards": {"evil.py:f()": 1.0}}),
    ("ck(7b)", ".", {"data": {"eval_rewards": ["evil.py:f()"]}}),
    ("run", "run", {"rewards": {"a(1)/evil.py:f()": 1.0}}),
    ("run", "run", {"rewards": {"format(x=1)/../a(1)/evil.py:f()": 1.0}}),
    ("run(1)", ".", {"data": {"task": "run(1).evil:f()"}}),
    ("run(1)", ".", {"sampling": {"environment": "evil.py:f()"}}),
    ("run(1)", "run(1)", {"stages": ["evil.py:f()"]}),
    ("run(1)", ".", {"stages": "evil.py:f()", "evil": {}}),
    ("run", "run", {"report_to": "evil.py:f"}),
    ("run", ".", {"stages": ["recipes/zoom.py:Zoom"]}),
    ("run", ".", {"rewards": {r"fluent(path='http\x3a//127.0.0.1/v1')": 1.0}}),
    ("run", ".", {"rewards": {"cls(classes='/etc/passwd')": 1.0}}),
    *(("run", "run", {section: {name: "evil:30"}}) for section, name in [
        ("data", "format"), ("optimizer", "name"), ("sampling", "engine"), ("grpo", "loss_type"),
        ("grpo", "advantages"),
    ]),
    ("run", "run", {"data": {"train": [{"file": "rows.jsonl", "rewards": ["evil:30"]}]}}),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "here", "values"), ATTACKS)
def test_code_that_a_found_recipe_names_is_refused_and_does_not_run(tmp_path, monkeypatch, write, folder, here, values):
    """Folder names with parentheses must not hide code that a recipe names."""
    for path in ("evil.py", "a(1)/evil.py"):
        (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / path).write_text(EVIL)
    write(values, f"{folder}/config.yaml")
    monkeypatch.chdir(tmp_path / here)
    folder = os.path.relpath(tmp_path / folder)
    arguments = "evil:30 evil.py:f() evil.py:f a(1)/evil.py:f()"  # other options contain the code's names as plain text
    texts = [
        f"--data.prompt_template={arguments} {{problem}}",
        "--output_dir=evil:30",
        "--sampling.stop_strings=evil:30",
    ]
    texts.append('--data.chat_template_kwargs={at: "evil:30"}')
    expected = r"config\.yaml was found automatically and would run the code .*; read the code, then pass --recipe="
    other = "--data.format" if "optimizer" in values else "--optimizer.name"
    for asked_for in ([], [f"{other}=no_evil.py:f()"], texts):
        with pytest.raises(PermissionError, match=expected):
            load_config(Path(folder) / "config.yaml", asked_for, is_found=True)
    assert not list(tmp_path.rglob("ran"))


def test_code_of_a_found_recipe_may_run_if_it_is_named(tmp_path, write, monkeypatch):
    """A recipe needs no permission to name built-in functions with numbers as options."""
    monkeypatch.chdir(tmp_path)
    code = "from minivlmrl.trainers.sft import SFTTrainer\nclass Mine(SFTTrainer):\n    stage = 'mine'\n"
    (tmp_path / "own.py").write_text(code)
    recipe = write({"stages": ["own.py:Mine"], "data": {"task": "own.py:f"}, "mine": {"max_steps": 1}})
    named = ["--stages=own.py:Mine", f"--data.task={tmp_path}/own.py:f"]
    assert load_config(recipe, named, is_found=True).mine == load_config(recipe).mine == SFTOptions(1)
    with pytest.raises(PermissionError, match=r"would run the code .*own\.py:f; read the code"):
        load_config(recipe, named[:1], is_found=True)
    numbers = ["--rewards={number(tolerance=0.05): 1.0, point(within=.1): 1}", "--data.task=shapes(pairs=8)"]
    load_config("shapes.yaml", numbers, is_found=True)


AGAIN = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from minivlmrl.trainers.sft import SFTTrainer, SFTOptions

@dataclass
class AgainConfig(SFTOptions):
    share: Annotated[float, "[0, 1]"] = 0.5
    fast: bool = False

class Again(SFTTrainer):
    stage = "again"
    config_type = AgainConfig

class Nameless(SFTTrainer):
    stage = "sft"

class HeldOut(SFTTrainer):
    stage = "eval"

class Dashed(SFTTrainer):
    stage = "my-stage"
"""
SECTION = {"stages": ["sft", "again.py:Again"], "again": {"share": 0.25}}


@pytest.fixture
def again(write):
    write(AGAIN, "again.py")
    return write(SECTION)


def test_a_stage_of_a_file_has_a_section(again, write, tmp_path):
    config = load_config(again, ["--again.fast", "--again.max_steps=7"])
    assert config.stage_names == ["sft", "again"] and config.stages[1] == f"{tmp_path / 'again.py'}:Again"
    assert (config.again.share, config.again.fast, config.again.max_steps) == (0.25, True, 7)
    assert load_config(write(to_yaml(config), "config.yaml")) == config
    values = ["--dpo.loss_type=[sigmoid,sft]", "--dpo.loss_weights=[1,2]", "--grpo.rollout_correction_bounds=[0,1]"]
    config = load_config(again, ["--sft.learning_rate=1e-4", "--rewards.format=1", "--data.task=shapes", *values])
    assert load_config(write(to_yaml(config), "config.yaml")) == config
    assert (load_config(again, ["--stages=sft"]).unused_sections, config.unused_sections) == (["again"], [])
    write(AGAIN.replace('stage = "again"', 'stage = "more"'), "more.py")
    both = f"--stages=[{tmp_path / 'again.py'}:Again, {tmp_path / 'more.py'}:Again]"
    assert load_config("shapes.yaml", [both, "--more.share=0.5"]).more.share == 0.5


def test_recipes_are_found_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("own_data.yaml").output_dir == "runs/own_data"
    (tmp_path / "own_data.yaml").write_text("output_dir: mine")
    assert load_config("own_data.yaml").output_dir == "mine"
    (tmp_path / "own").mkdir()
    copy = shutil.copy(ROOT / "recipes" / "zoom.yaml", tmp_path / "own")
    ours, config = recipes_folder(), load_config(copy)
    assert config.model.config == str(ours / "zoom_model.json") and config.data.task == f"{ours / 'zoom.py'}:TASK"
    (tmp_path / "own" / "zoom_model.json").touch()
    assert load_config(copy).model.config == str(tmp_path / "own" / "zoom_model.json")
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"is the folder of a model, .*; write own_data\.yaml --model\.path="):
        load_config(tmp_path)
    for name, meant in (("zooms.yaml", "zoom.yaml"), ("shape.yaml", "shapes.yaml")):
        with pytest.raises(ValueError, match=rf"in {tmp_path} and .*recipes; did you mean {meant}"):
            load_config(name)
    assert load_config("recipes/shapes.yaml").output_dir == "runs/shapes"  # as every page writes it
    with pytest.raises(ValueError, match=rf"no file {tmp_path}/gone\.py; .*, in the working folder {tmp_path} and in "):
        load_config("shapes.yaml", ["--stages=gone.py:Mine"])


NO_YAML = "FOLDER/recipe.yaml: the text is not valid YAML"
REFUSED = [  # (recipe, overrides, error message)
    ({}, ["--grpo.betta=1"], "command line: unknown key grpo.betta; did you mean --grpo.beta?"),
    ("max_new_tokens: 4", [], "FOLDER/recipe.yaml: unknown key max_new_tokens; the name in minivlmrl is sampling.ma"),
    ("grpo.beta: 4", [], "FOLDER/recipe.yaml: unknown key grpo.beta; write beta in the section grpo"),
    ({}, ["--seed.x=1"], "command line: seed is"),
    ({}, ["--grpo.beta"], "--grpo.beta has no value; write --grpo.beta=VALUE"),
    ({}, ["--a.optim.lr=1"], "command line: unknown key a.optim.lr; the name in minivlmrl is --grpo.learning_rate"),
    (
        {},
        ["--data=a.jsonl"],
        "command line: data is 'a.jsonl', but it must be an object with names and values; write "
        "--data.train_file=a.jsonl",
    ),
    (
        "model: Qwen/x",
        [],
        "FOLDER/recipe.yaml: model is 'Qwen/x', but it must be an object with names and values; "
        "write model: {path: Qwen/x}",
    ),
    (
        {},
        ["--rewards=a.py"],
        "command line: rewards is 'a.py', but it must be of type dict[str, float, finite]; write "
        '"--rewards={a.py:FUNCTION: 1.0}"',
    ),
    ({}, ["--grpo=1"], "command line: grpo is 1, but it must be an object with names and values"),
    ({}, ["seed=1"], "'seed=1': an override must have the form --section.name=value; write --seed=1"),
    (
        {},
        ["--data.train=a.jsonl"],
        "command line: data.train is 'a.jsonl', but it must be an object with names and value",
    ),
    (
        {},
        ["--sharding=true"],
        "command line: sharding is True, but it must be an object with names and values; write --sh",
    ),
    (
        "data: {train: a.jsonl}",
        [],
        "FOLDER/recipe.yaml: data.train is 'a.jsonl', but it must be an object with names and",
    ),
    ({}, ["--data.train_file=a.jsonl", "b.jsonl"], "'b.jsonl': an override must have the form --section.name=value"),
    ({}, ["--seed=1", "mine.yaml"], "'mine.yaml': an override must have the form --section.name=value. The recipe is"),
    ({}, ["--rewards={accuracy: 0, format: 0.0}"], "command line: rewards are {'accuracy': 0.0, 'format': 0.0}; at"),
    ("seed: [1\n", [], NO_YAML + " (line 1, 'seed: [1': close the bracket"),
    ("data:\n  system_prompt: 'Yes\n", [], NO_YAML + ' (line 2, "system_prompt: \'Yes": close the quote)'),
    ("seed: 2024-13-45", [], NO_YAML + " (line 1, 'seed: 2024-13-45': write the value in quotes)"),
    ("seed: " + "[" * 2000, [], NO_YAML),
    # YAML would take the last value
    ("sft: {max_steps: 1}\nsft: {}", [], NO_YAML + " (line 2, 'sft: {}': the key 'sft' occurs twice; remove one of"),
    ("seed: 3\nsft:7\n\ngrpo: 1", [], NO_YAML + " (line 2: write `sft: 7`)"),
    ("seed: 010", [], NO_YAML + " (line 1, 'seed: 010': YAML reads 010 as 8; write 10, or '010' for a text)"),
    ("seed: 1:30", [], NO_YAML + " (line 1, 'seed: 1:30': YAML reads 1:30 as 90; write it in quotes)"),
    ("seed: 1:30.5", [], NO_YAML + " (line 1, 'seed: 1:30.5': YAML reads 1:30.5 as 90.5; write it in quotes)"),
    (
        {},
        ["--seed=010"],
        "command line: quote the value of seed: the text is not valid YAML (line 1, '010': YAML reads",
    ),
    ("# seed: 7\n", ["--grpo.beta=1"], "FOLDER/recipe.yaml: the recipe is empty; copy one, such as"),
    ("grpo:\n\tbeta: 1", [], NO_YAML + " (line 2, 'beta: 1': use spaces instead of the tab)"),
    ("data: {prompt_template: {problem} Yes}", [], NO_YAML),
    # overrides must not replace a recipe that is not read
    ("seed = 7\nstages = [sft]", ["--grpo.beta=1"], "FOLDER/recipe.yaml: the recipe has no names and values; line 1"),
    ("seed", ["--grpo.beta=1"], "FOLDER/recipe.yaml: the recipe has no names and values; line 1, 'seed': write a name"),
    ("[seed: 7]", ["--grpo.beta=1"], "FOLDER/recipe.yaml: the recipe is [{'seed': 7}], but it must be names and"),
    (SECTION, ["--again.shere=1"], "command line: unknown key again.shere; did you mean --again.share?"),
    (SECTION, ["--again.share=2"], "command line: again.share is 2.0, but it must be in [0, 1]"),
    (SECTION, ["--stages=3"], "command line: stages is 3, but it must be of type list"),
    (SECTION, ["--stages=again.py:Nameless"], "stages: Nameless.stage is 'sft', but it must be a new name such as"),
    (SECTION, ["--stages=again.py:HeldOut"], "stages: HeldOut.stage is 'eval', but it must be a new name such as"),
    (SECTION, ["--stages=again.py:Dashed"], "stages: Dashed.stage is 'my-stage', but it must be a new name such as"),
    (SECTION, ["--stages=[again.py:Again(share=1)]"], "stages: FOLDER/again.py:Again(share=1): write the options"),
    ({}, ["--rewards={accuracy:1.0}"], "command line: rewards: accuracy:1.0 has no value; write a space after"),
]


@pytest.mark.parametrize(("content", "overrides", "sentence"), REFUSED)
def test_a_recipe_that_is_refused(write, tmp_path, content, overrides, sentence):
    write(AGAIN, "again.py")
    if content is not None:
        write(content)
    with pytest.raises(ValueError, match="^" + re.escape(sentence.replace("FOLDER", str(tmp_path)))):
        load_config(tmp_path / "recipe.yaml", overrides)


@pytest.mark.parametrize(("override", "cure"), [
    ("--grpo.loss_type=gspo", r"--grpo\.importance_sampling_level \(`importance_sampling_level: sequence`\)$"),
    ("--grpo.advantages=gae", r"the name in minivlmrl is --stages \(`\[ppo\]`\)$"),
    ("--model.dtype=bf16", r"'float64'; write bfloat16$"),
    ("--bf16", r"unknown key bf16; the name in minivlmrl is --model\.compute_dtype \(`bfloat16`, no autocast\)$"),
    ("--learning_rate=1", r" or --ppo\.learning_rate$"),  # without the note of another name
    ("--optimizer.name=adamww", r"did you mean adamw\?$"),
    ("--grpo.loss_type=mine", r"'vespo' or file\.py:name$"),
])  # fmt: skip
def test_a_value_of_another_project_is_answered(override, cure):
    with pytest.raises(ValueError, match=cure):
        load_config("shapes.yaml", [override])


INHERITS = """
from dataclasses import dataclass
from minivlmrl.config.options import GRPOOptions
from minivlmrl.trainers.grpo import GRPOTrainer

@dataclass
class Options(GRPOOptions):
    keep: float = 0.4

class Mine(GRPOTrainer):
    stage = "mine"
    config_type = Options

class Later(Mine):
    stage = "later"
"""


def test_the_section_of_an_own_stage_starts_from_the_section_it_inherits(write, tmp_path):
    write(INHERITS, "own.py")
    recipe = write({"grpo": {"beta": 0.02, "learning_rate": 3e-4}, "mine": {"keep": 0.5, "beta": 0.1}})
    mine, later = (f"{tmp_path / 'own.py'}:{name}" for name in ("Mine", "Later"))
    both = load_config(recipe, [f"--stages=[grpo, {mine}, {later}]", "--grpo.max_steps=7", "--later.keep=0.6"])
    for section, expected in ((both.mine, (0.1, 3e-4, 7, 0.5)), (both.later, (0.1, 3e-4, 7, 0.6))):
        assert (section.beta, section.learning_rate, section.max_steps, section.keep) == expected
    assert load_config(write(to_yaml(both), "again.yaml")) == both
    alone = load_config(recipe, [f"--stages=[{later}]"])
    assert (alone.later.keep, alone.later.beta) == (0.5, 0.1) and not alone.unused_sections
    trainers = find_trainers(both)
    differing = {stage: differing_options(both, trainer) for stage, trainer in trainers.items()}
    assert differing == {
        "grpo": [], "mine": ["mine.beta=0.1 (grpo.beta=0.02)", "mine.keep=0.5"],
        "later": ["later.keep=0.6 (mine.keep=0.5)"],
    }  # fmt: skip
    with pytest.raises(
        AttributeError, match=r"no option 'beta'; the sections dpo, grpo, later have it: .* self\.options\.beta"
    ):
        alone.beta  # noqa: B018
    notes = [*collect_notes(alone, find_trainers(alone))]
    assert notes[0] == "options of the stage later that differ: later.beta=0.1 (grpo.beta=0.02), later.keep=0.5"
    assert not any("grpo.beta" in note for note in notes[1:])  # the section grpo has an effect
