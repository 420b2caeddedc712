"""Test the checks before the first step: rewards, row lengths, and notes about options."""

import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import PIL.Image
import pytest
import torch

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import as_overrides, load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor, encode_answer
from minivlmrl.data.rows import Row
from minivlmrl.distributed.process_group import World
from minivlmrl.monitor.check import preflight
from minivlmrl.run import setup
from minivlmrl.run.datasets import NEEDS
from minivlmrl.tasks import shapes
from minivlmrl.trainers.registry import find_trainer
from tests.helpers.runs import write_lines
from tests.helpers.stages import ONE
from tests.helpers.talk import IMAGE_PART, assistant, user
from tests.model.test_checkpoint import edit_json

PROCESSOR = Processor(shapes.tokenizer(), ImageProcessor(7, 2, 2, min_pixels=14 * 14))


@pytest.mark.parametrize(
    ("returned", "option"), [("[float('nan')]", "rewards={{{}: 1.0}}"), ("[]", "data.eval_rewards=[format, '{}']")]
)
def test_rewards_are_tried_before_weights_are_created(run, tmp_path, monkeypatch, returned, option):
    (tmp_path / "own.py").write_text(f"def own(completions, **columns):\n    return {returned}\n")
    monkeypatch.setattr(setup, "random_weights", None)  # calling it would fail
    name = f"{tmp_path / 'own.py'}:own"
    with pytest.raises(ValueError, match=rf"reward {name} returned "):
        run("--stages=[grpo]", f"--{option.format(name)}")


def test_built_in_rewards_are_tried_on_a_row():
    text = Row([{"role": "user", "content": "?"}], [], {"problem": "?", "solution": "a"})
    config = RunConfig(rewards={"iou": 1, "box_format": 1, "reward_model": 1, "accuracy": 1})
    config.data.eval_rewards = ["iou", "format"]
    picture = PIL.Image.new("RGB", (8, 8))
    shown = [user([IMAGE_PART])]
    box, wrong = (Row(shown, [picture], {"problem": "?", "solution": x}) for x in ([1, 2, 3, 4], "a"))
    preflight.try_rewards(config, {"grpo": [box], "eval": [box]}, PROCESSOR)
    preflight.try_rewards(config, {"dpo": [text], "eval": [text]}, PROCESSOR)  # held-out pairs need no solution
    with pytest.raises(ValueError, match=r"reward iou, .*solution 'a' is not a box"):
        preflight.try_rewards(config, {"grpo": [wrong]}, PROCESSOR)
    row = Row(text.messages, [], {"problem": "?"}, where="rows.jsonl:1")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: reward accuracy, .* argument: 'solution'"):
        preflight.try_rewards(RunConfig(), {"grpo": [row]}, PROCESSOR)
    preflight.try_rewards(RunConfig(), {"eval": [row]}, PROCESSOR)  # only rewards of training need their columns


def test_a_run_prints_its_device_kernels_and_model_size(home, capsys, monkeypatch):
    config = load_config(home / "recipe.yaml", [])
    policy, _ = setup.build_model(config, ONE)
    config.model.compute_dtype = "bfloat16"
    preflight.describe_hardware(config, World(0, 2, torch.device("cpu")))
    assert re.fullmatch(r"device: CPU \(threads: \d+\); ranks: 2; kernels: torch\n", capsys.readouterr().out)
    monkeypatch.setattr(preflight, "backend_for", lambda tensor, kernel: "torch" if "4" in kernel else "triton")
    preflight.describe_hardware(config, ONE)
    assert capsys.readouterr().out.splitlines()[0].endswith("; ranks: 1; kernels: triton (torch for nf4_unpack)")
    preflight.describe_model(config, policy)
    assert re.fullmatch(r"model: [\d,]+ parameters in float32, computed in bfloat16\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("value", "expected"), [("true", r"the answer with '<think>\n', which reward"), ("false", "the answer with ''")]
)
def test_a_run_prints_the_opened_thought(checkpoint, published, run, user_data, tmp_path, capsys, value, expected):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "chat_template.jinja").write_text(published("qwen3_5_nothink"))
    options = [f"--model.path={model}", "--stages=[]", f"--data.chat_template_kwargs={{enable_thinking: {value}}}"]
    folder = run(*user_data, *options)
    assert f"\nprompts open {expected}" in capsys.readouterr().out
    saved = load_config(folder / "checkpoint" / "minivlmrl.yaml").data
    assert saved.chat_template_kwargs == {"enable_thinking": value == "true"}


NO_TEXT = "solution .* is an object or a list, which no answer can equal"
NO_BOX = r"solution .* is not a box; the solution must be \[x1"
OUTSIDE = r"the solution .* is not a box inside the image of \d+ x \d+ pixels; write x1, y1, x2, y2 in pixels of the"


@pytest.mark.parametrize(("reward", "good", "bad", "expected"), [
    ("accuracy", "x", ["x"], NO_TEXT),
    ("accuracy", "x", {"label": "x"}, NO_TEXT),
    ("accuracy", 2.0, [1, 2], None),
    ("accuracy", "x", "", None),
    *[(name, [1, 1, 3, 3], bad, expected) for name in ("iou", "acc_0_5") for bad, expected in (
        ("cat", NO_BOX), ([9, 9, 9, 9], NO_BOX), ([3, 3, 1, 1], NO_BOX), ([1, 2, 3], NO_BOX),
        ([0, 0, 9, 9], OUTSIDE), ([[1, 2, 3, 4], [-9, 0, 3, 3]], OUTSIDE), ([0.1, 0.1, 0.9, 0.9], OUTSIDE),
        ('{"bbox_2d": [0, 0, 9, 9]}', OUTSIDE), ([0, 0, 4.5, 4], None), ([], None), ("None", None),
    )],
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["grpo", "eval", "sft"])
def test_a_solution_that_no_answer_can_equal_ends_the_run(write_rows, name, reward, good, bad, expected):
    rows = [{"problem": "a", "image": "red.png", "solution": x} for x in (good, good, bad)]
    check = partial(preflight.check_truths, RunConfig(rewards={reward: 1.0}), {name: FileDataset(write_rows(*rows))})
    if expected is None or name == "sft":  # SFT reads no solution
        check()
        return
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: {expected}"):
        check()


def test_a_solution_is_compared_only_by_the_rewards_of_its_file(write_rows):
    file = write_rows({"problem": "a", "solution": ["x"]})
    preflight.check_truths(RunConfig(), {"grpo": FileDataset(file, constants={"row_rewards": ["format"]})})
    compared = FileDataset(file, constants={"row_rewards": ["accuracy"]})
    with pytest.raises(ValueError, match=NO_TEXT):
        preflight.check_truths(RunConfig(), {"grpo": compared})


def test_long_prompts_are_skipped_and_reported(write_rows, capsys):
    lines = [{"problem": "a", "image": "red.png"}, {"problem": "a " * 90, "image": "red.png"}, {"problem": "b"}]
    config = RunConfig()
    config.data.max_prompt_tokens, config.max_epochs, config.grpo.prompts_per_step = 60, 3.0, 4
    datasets = dict.fromkeys(("grpo", "eval"), FileDataset(write_rows(*lines)))
    fitted = setup.filter_long_rows(config, datasets, PROCESSOR, ONE)
    assert fitted["eval"] is datasets["eval"]  # held-out rows stay, so that evaluations can be compared
    rows = fitted["grpo"]
    assert [row.columns["problem"] for row in rows] == ["a", "b"]
    setup.limit_epochs(config, {"grpo": rows})
    assert config.grpo.max_steps == 2
    message = r"rows of grpo: 1 over data.max_prompt_tokens are left out: .*rows\.jsonl:2: 1\d\d tokens\n"
    assert re.fullmatch(message, capsys.readouterr().out)
    config.data.max_prompt_tokens = 3
    with pytest.raises(ValueError, match=r"no rows remain in the dataset; check .*max_prompt_tokens"):
        setup.filter_long_rows(config, {"grpo": FileDataset(write_rows(*lines))}, PROCESSOR, ONE)


@pytest.mark.parametrize(("stage", "options", "steps"), [
    ("sft", {}, 6), ("grpo", {"num_iterations": 2, "steps_per_generation": 3}, 12), ("ppo", {"num_iterations": 3}, 18),
], ids=["sft", "grpo", "ppo"])  # fmt: skip
def test_an_epoch_takes_all_rows_however_often_a_rollout_is_used(stage, options, steps):
    config = RunConfig(stages=[stage], max_epochs=1.0)
    vars(getattr(config, stage)).update(options, prompts_per_step=4)
    setup.limit_epochs(config, {stage: range(24)})
    assert getattr(config, stage).max_steps == steps


@pytest.mark.parametrize(("stage", "long"), [
    ("sft", {"completion": [assistant("a"), user("b " * 30), assistant("c")]}),
    ("dpo", {"chosen": "x " * 60, "rejected": "x"}), ("reward_model", {"chosen": "x", "rejected": "x " * 60}),
    ("sft", {"problem": "a " * 60, "completion": "x"}),
], ids=str)  # fmt: skip
def test_a_given_answer_counts_with_its_prompt(write_rows, capsys, stage, long):
    short = {"problem": "a", "image": "red.png", "completion": "x", "chosen": "x", "rejected": "y"}
    config = RunConfig(stages=[stage])
    trainer = find_trainer(stage, config)
    rows = FileDataset(write_rows(short, short | long), NEEDS[trainer.needs])
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=80))
    message = r"rows\.jsonl:2: (\d+) tokens of prompt and answer, and 0 to .* 80 .* with data\.max_prompt_tokens=80$"
    with pytest.raises(ValueError, match=message) as error:
        setup.check_positions(config, {stage: trainer.needs}, {stage: rows}, model, PROCESSOR)
    length = int(re.search(message, str(error.value))[1])
    answers = [encode_answer(PROCESSOR, rows[1], getattr(rows[1], name)) for name in trainer.answers]
    assert length == len(rows[1].prompt(PROCESSOR).input_ids) + max(len(answer.ids) for answer in answers)
    for limit, kept in ((length - 1, 1), (length, 2)):
        config.data.max_prompt_tokens = limit
        assert len(setup.filter_long_rows(config, {stage: rows}, PROCESSOR, ONE)[stage]) == kept
        out = f"1 over data.max_prompt_tokens are left out: {rows[1].where}: {length} tokens"
        printed = capsys.readouterr().out
        assert out in printed if kept == 1 else not printed


def test_a_prompt_with_too_many_positions_is_refused(run, user_data, home, tmp_path):
    """The completion length counts only in stages that generate, and only for rows that are not skipped."""
    checkpoint = shutil.copytree(home / "untrained" / "checkpoint", tmp_path / "short")
    edit_json(checkpoint / "config.json", max_position_embeddings=100)
    texts = ["a", "a " * 75, "b"]
    lines = [{"problem": text, "solution": "x", "completion": "x"} for text in texts]
    write_lines(tmp_path / "rows.jsonl", lines)
    options = [*user_data, f"--model.path={checkpoint}", f"--data.train_file={tmp_path / 'rows.jsonl'}"]
    options += ["--sampling.max_new_tokens=10", "--sft.max_steps=1", "--grpo.max_steps=1"]
    message = (
        r"rows.jsonl:2: (\d+) tokens of prompt and answer, and 10 to sample, exceed the model's 100 \(max_position"
    )
    cures = r"_embeddings\); lower sampling\.max_new_tokens, or shorten .* with data\.max_prompt_tokens=90$"
    with pytest.raises(ValueError, match=message + cures) as raised:
        run(*options, "--stages=[grpo]")
    assert 90 < int(re.search(message, str(raised.value))[1]) <= 100
    with pytest.raises(ValueError, match=r"^sampling\.max_new_tokens is 100, .* less than the model's 100 \("):
        run(*options, "--stages=[grpo]", "--sampling.max_new_tokens=100")
    run(*options, "--stages=[sft]", name="given answers")
    run(*options, "--stages=[grpo]", "--data.max_prompt_tokens=90", name="left out")
    with pytest.raises(ValueError, match=r"rows.jsonl:2: .* or shorten or remove the row"):
        run(*options, "--stages=[sft]", f"--data.eval_file={tmp_path / 'rows.jsonl'}", name="eval")


def notes(*options, **datasets):
    return notes_of(load_config("shapes.yaml", list(options)), **datasets)


def notes_of(config, **datasets):
    trainers = {name: find_trainer(name, config) for name in config.stage_names}
    return [*preflight.collect_notes(config, trainers), *preflight.find_mistakes(config, datasets)]


def test_boxes_of_rows_with_several_images_are_said(write_rows):
    row = {"problem": "a", "images": ["red.png", "blue.png"], "solution": [1, 2, 5, 6]}
    rows = FileDataset(write_rows(row, row | {"images": ["red.png"]}, row | {"solution": "cat"}))
    assert not notes(grpo=rows)
    for reward in ("iou", "box_format", f"{recipes_folder()}/vlm_r1.py:detection"):
        [note] = notes(f"--rewards={{'{reward}': 1.0}}", grpo=rows)
        assert note.startswith("1 of 3 rows of grpo have a box and several images (the first is ")
        assert f"but reward {reward} measures boxes in the first image" in note


def test_other_prompts_than_those_of_the_trained_folder_are_said(tmp_path):
    (tmp_path / "minivlmrl.yaml").write_text("data: {prompt_template: 'Look. {problem}', system_prompt: null}")
    [note] = notes("--model.config=null", f"--model.path={tmp_path}")
    assert note.startswith(f"{tmp_path / 'minivlmrl.yaml'}, with which the model was trained, sets other values ")
    same = "--model.config=null", f"--model.path={tmp_path}", "--data.prompt_template=Look. {problem}"
    assert not notes(*same)
    for option in ("reward_model.path", "reference.path", "ppo.critic_path"):
        assert note in notes(f"--{option}={tmp_path}")
    sized = "data: {max_pixels: 3136, min_pixels: null, chat_template_kwargs: {enable_thinking: false}}"
    (tmp_path / "minivlmrl.yaml").write_text(sized)
    assert [note.partition("for ")[2] for note in notes(*same)] == ["data.chat_template_kwargs"]
    [note] = notes(*same, "--data.max_pixels=6272", "--data.min_pixels=784")
    assert note.endswith("for data.chat_template_kwargs, data.max_pixels")


def test_an_empty_solution_is_said(write_rows):
    rows = FileDataset(write_rows(*({"problem": "a", "solution": text} for text in ("red", "", " "))))
    [note] = notes(grpo=rows)
    assert note.startswith("2 of 3 rows of grpo have an empty solution, which reward accuracy does not score (the")
    assert not notes(sft=rows)


def test_options_without_effect_are_reported():
    assert notes() == []
    for recipe in sorted(recipes_folder().glob("*.yaml")):
        assert notes_of(load_config(recipe)) == []
    dpo, grpo = notes("--stages=[sft]", "--dpo.f_alpha_divergence_coef=0.9", "--dpo.max_steps=3")
    assert dpo == "dpo.max_steps, dpo.f_alpha_divergence_coef: no effect, because `stages` does not include dpo"
    assert grpo.startswith("grpo.max_steps, ")
    assert grpo.endswith(": no effect, because `stages` does not include grpo")
    files = {"data.train_file": "a", "data.files": {"sft": "b", "dpo": "c"}, "data.task": None}
    scored = {"reward_model.path": "there", "rewards": {"reward_model": 1.0}}
    logs = {"log_completions": 5}
    files, grpo, *message = notes(*as_overrides(files | scored | logs), "--stages=[sft]")
    assert files == "data.files.dpo: no effect, because `stages` does not include dpo"
    assert message == [
        "data.train_file: no effect, because data.files has the rows of all stages",
        "rewards, log_completions: no effect, because no stage samples completions",
    ]
    evaluated = notes("--stages=[sft]", "--rewards={accuracy: 1.0}", "--log_completions=5")
    assert evaluated[-1] == "log_completions: no effect, because no stage samples completions"
    assert notes("--stages=[]")[0] == "stages is []: nothing is trained; the model is only evaluated and saved"


@pytest.mark.parametrize(("options", "expected", "cures"), [
    (["--data.answer_format=whole"], "rewards has format, which asks for tags, but data.answer_format is whole, so",
     ["rewards={accuracy: 1.0}"]),
    (["--model.dtype=bfloat16", "--grpo.learning_rate=1e-6"],
     "model.dtype is bfloat16 and grpo.learning_rate is 1e-06, so updates of weights over 0.0005 are lost, because",
     ["model.dtype=float32", "optimizer.name=adamw_8bit", "adapter.r=16", "grpo.learning_rate=1e-4"]),
    (["--model.dtype=bfloat16", "--grpo.learning_rate=1e-6", "--adapter.r=16", "--adapter.modules_to_save=[merger]"],
     "model.dtype is bfloat16 and grpo.learning_rate is 1e-06, so updates of weights over 0.0005 are lost, because",
     ["model.dtype=float32", "adapter.modules_to_save=[]"]),
])  # fmt: skip
def test_a_mistake_is_reported_until_it_is_cured(options, expected, cures):
    [line] = notes(*options)
    assert line.startswith(expected)
    for cure in cures:
        assert notes(*options, f"--{cure}") == []


def test_evaluation_rows_that_are_training_rows_are_counted(write_rows, tmp_path):
    """Rows are equal if question and pixels are equal, whatever the names of the image files are."""
    lines = [{"problem": "What?", "image": f"{name}.png", "solution": name} for name in ("red", "green", "blue")]
    training = FileDataset(write_rows(*lines))
    (tmp_path / "eval").mkdir()
    shutil.copy(tmp_path / "green.png", tmp_path / "eval" / "red.png")
    rows = lines[0], {**lines[0], "problem": "Why?"}
    write_lines(tmp_path / "eval" / "rows.jsonl", rows)
    held_out = FileDataset(tmp_path / "eval" / "rows.jsonl")
    cure = "so they measure memorization; remove them from data.eval_file"
    message = f"1 of 2 evaluation rows are also training rows of grpo (the first is {tmp_path}/eval/rows.jsonl:1), "
    message += cure
    assert notes(grpo=training, eval=held_out) == [message]
    assert notes(grpo=training.select(training.facts[::2]), eval=held_out) == []
    assert notes(grpo=shapes.Shapes(1, "x"), eval=shapes.Shapes(1, "x")) == []
    twice, both = training.select([training.facts[1]] * 2), held_out.select(held_out.facts)
    assert notes(grpo=twice, eval=both) == [message]


def test_held_out_rows_that_a_reward_cannot_score_name_the_option():
    text = Row([user([IMAGE_PART])], [PIL.Image.new("RGB", (8, 8))], {"problem": "?", "solution": "a"})
    config = RunConfig(rewards={"accuracy": 1, "iou": 1})
    with pytest.raises(
        ValueError, match=r"'a' is not a box.*; data\.eval_rewards chooses the rewards of data\.eval_file$"
    ):
        preflight.try_rewards(config, {"eval": [text]}, PROCESSOR)
    config.data.eval_rewards = ["accuracy"]
    preflight.try_rewards(config, {"eval": [text]}, PROCESSOR)


def test_labels_that_are_all_equal_are_named(write_rows):
    config = load_config("shapes.yaml", [f"--stages=[{recipes_folder()}/kto.py:KTO]"])
    row = {"problem": "a", "completion": "b", "label": True}
    one, both = (FileDataset(write_rows(*rows), ("label",)) for rows in ([row], [row, row | {"label": False}]))
    stage = config.stage_names[0]
    assert not any("label" in note for note in preflight.find_mistakes(config, {stage: both}))
    assert any("have the label true" in note for note in preflight.find_mistakes(config, {stage: one}))


def test_the_unit_of_boxes_in_answers_is_said(write_rows):
    answers = ["red", '{"bbox_2d": [1, 2, 30, 40], "label": "cat"}']
    rows = FileDataset(write_rows(*({"problem": "a", "completion": text} for text in answers)))
    processor = replace(PROCESSOR, box_space="thousandths")
    [note] = preflight.describe_boxes({"sft": find_trainer("sft", RunConfig())}, {"sft": rows}, processor)
    assert "answers contain boxes such as [1, 2, 30, 40], which are trained on unchanged. This model's unit is" in note
    assert "is thousandths (data.box_space)" in note
    assert not list(preflight.describe_boxes({"grpo": find_trainer("grpo", RunConfig())}, {"grpo": rows}, processor))
    rows = FileDataset(write_rows({"problem": "a", "completion": "(1, 2), (3, 4)", "box_space": "unit"}))
    [note] = preflight.describe_boxes({"sft": find_trainer("sft", RunConfig())}, {"sft": rows}, processor)
    assert "boxes such as (1, 2), (3, 4)" in note and "is unit (data.box_space)" in note
