"""Test that completions.jsonl shows the completions of a step, and does not change the run."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import PIL.Image
import pytest
import torch
from pytest import approx

from minivlmrl.config.options import RunConfig
from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion
from minivlmrl.extras.answers import evaluate
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.rewards.columns import reward_columns
from minivlmrl.rewards.text import find_answer, tag_format
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.rollout_log import describe_group, tokens
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.tasks import shapes
from minivlmrl.trainers.base import Rollout, Step
from tests.helpers.on_ranks import launch
from tests.helpers.runs import LETTERS, metrics

EVERY_STEP = ("--log_completions=1", "--stages=[grpo]", "--grpo.num_generations=4", "--grpo.max_steps=2", LETTERS)
completions = partial(metrics, name="completions.jsonl")


@pytest.mark.usefixtures("quick", "varied_rollouts")
def test_lines_agree_with_the_metrics_of_the_step(run):
    folder = run(*EVERY_STEP, "--grpo.prompts_per_step=2", "--grpo.micro_batch_size=1", "--grpo.soft_punish_cache=4")
    lines = completions(folder)
    steps = metrics(folder)
    assert [(line["stage"], line["step"]) for line in lines] == [("grpo", step) for step in (0, 0, 1, 1)]
    for number, step in enumerate(steps):
        both = [c for line in lines[2 * number : 2 * number + 2] for c in line["completions"]]
        assert len(both) == 8
        totals = torch.tensor([c["reward"] for c in both])
        assert step["reward"] == approx(totals.mean().item()) and step["reward_std"] == approx(totals.std().item())
        assert step["group_reward_std"] == approx(totals.view(2, 4).std(1).mean().item())
        for c in both:  # the penalty is 0 up to 2 tokens, and then -1/4 for each further token
            assert c["reward"] == approx(c["rewards"]["letters"] + min(0, 2 - len(c["tokens"])) / 4)
        for name in ("letters", "format", "accuracy"):
            values = torch.tensor([c["rewards"][name] for c in both])
            assert step[f"rewards/{name}/mean"] == approx(values.mean().item())
            assert step[f"rewards/{name}/std"] == approx(values.std().item())
        lengths = [len(c["tokens"]) for c in both]
        terminated = [len(c["tokens"]) for c in both if c["stopped"]]
        for kind, some in (("length", lengths), ("terminated_length", terminated)):
            found = [step[f"completions/{of}_{kind}"] for of in ("mean", "min", "max")]
            assert found == approx([sum(some) / len(some), min(some), max(some)])
        assert step["completions/clipped_ratio"] == approx(1 - len(terminated) / 8)
    for line in lines:
        earned = torch.tensor([c["reward"] for c in line["completions"]])
        expected = (earned - earned.mean()) / (earned.std() + 1e-4)
        assert [c["advantage"] for c in line["completions"]] == approx(expected.tolist(), abs=1e-5)
        assert line["prompt"] == "What is it?" and line["solution"].count(" ") == 1
        assert all(logp <= 0 for c in line["completions"] for _, logp in c["tokens"])
        [image] = line["images"]
        assert PIL.Image.open(folder / image).size == (56, 56)


def test_a_thought_opened_by_the_prompt_is_part_of_the_text(stage, published):
    """Rewards and reports read a thought that the prompt opened, but training uses only the ids of the completion."""
    template = ChatTemplate(published("qwen3_5_think"), "t")
    end = "</think>\n<answer>green square</answer>"
    one = stage("grpo", "--grpo.num_generations=2", model="qwen3_5").trainer
    one.processor.template = template
    row = shapes.Shapes(1, "rows")[0]
    ids = torch.tensor(one.processor.tokenizer.encode(f"The square is green.\n{end}"))
    group = [Completion(ids, torch.zeros(len(ids))), Completion(ids[:2], torch.zeros(2))]
    prompt = row.prompt(one.processor)
    assert one.processor.decode(prompt.input_ids).endswith("<|im_start|>assistant\n<think>\n")
    columns = reward_columns([row], [prompt], [group], one.processor)
    texts = columns["completions"]
    assert texts == [f"<think>\nThe square is green.\n{end}", "<think>\n" + one.processor.decode(ids[:2])]
    assert tag_format(texts) == [1.0, 0.0] and columns["answer_texts"] == ["green square", None]
    assert columns["completion_ids"] == [ids.tolist(), ids[:2].tolist()]
    [samples] = Rollout.join([row], [prompt], [group], torch.zeros(2, 1)).groups
    lines = describe_group(one, samples, {})["completions"]
    assert [line["text"] for line in lines] == texts and "".join(t for t, _ in lines[0]["tokens"]) == texts[0]
    assert [line["tokens"][0] for line in lines] == [("<think>\n", None)] * 2
    evaluated = evaluate.result_line(one.processor, [], None, row, group, [[], []])["answers"]
    assert [answer["text"] for answer in evaluated] == texts and evaluated[0]["answer"] == "green square"


@pytest.mark.usefixtures("quick", "varied_rollouts")
def test_a_completion_has_its_answer_and_the_reasons_of_its_rewards(run, tmp_path):
    reward = tmp_path / "short.py"
    reward.write_text(
        "def short(completions, answer_texts, log_extra, **columns):\n"
        "    log_extra('why', [f'{len(text)} characters, answer {answer}'\n"
        "                      for text, answer in zip(completions, answer_texts)])\n"
        "    log_extra('characters', [len(text) for text in completions])\n"
        "    return [-float(len(text)) for text in completions]\n"
    )
    name = f"{reward}:short"
    options = f"--rewards={{'{name}': 1, format: 1, accuracy: 1}}", "--data.answer_format=last_line"
    logged = [one for line in completions(run(*EVERY_STEP[:-1], *options)) for one in line["completions"]]
    assert len(logged) == 2 * 4 * 4
    for one in logged:
        text, answer, why = one["text"], one["answer"], one["why"]
        assert answer == find_answer(text, "last_line")
        assert why[name] == f"{len(text)} characters, answer {answer}" and one["extra"] == {"characters": len(text)}
        assert why.keys() - {name} == {other for other in ("format", "accuracy") if one["rewards"][other] == 0}
    assert {one["why"].get("format") for one in logged} & {"no <think>"}


@pytest.mark.usefixtures("quick", "varied_rollouts")
def test_metrics_do_not_depend_on_the_log(run):
    ppo = (*EVERY_STEP, "--stages=[ppo]", "--ppo.max_steps=2")
    loud = run(*ppo, name="loud")
    silent = run(*ppo, "--log_completions=0", name="silent")
    assert (loud / "metrics.jsonl").read_bytes() == (silent / "metrics.jsonl").read_bytes()
    assert len(completions(loud)) == 2 * 4 and not (silent / "completions.jsonl").exists()


def log_on_rank(folder, overrides, world):
    """Log one step, in which rank 0 trains on two prompts and rank 1 on one prompt."""
    config = RunConfig(output_dir=str(folder), **overrides)
    metrics_log = MetricsLog(config, world, TrainerState(0, ["grpo"], num_log_lines={}))
    metrics_log.open_files()
    log = metrics_log.completions
    rows = [replace(row, index=10 * world.rank + i) for i, row in enumerate(list(shapes.Shapes(2, "rows")))]
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    one = Completion(torch.tensor(processor.tokenizer.encode("a")), torch.tensor([-0.5]))
    rollout = Rollout.join(rows, [row.prompt(processor) for row in rows], [[one], [one]], torch.zeros(2, 2))
    given = {"config": config, "processor": processor, "options": SimpleNamespace(num_generations=1), "world": world}
    trainer = SimpleNamespace(stage="grpo", **given)
    trainer.total_rewards = lambda samples: torch.zeros(len(samples))
    log.step(trainer, Step([], rollout=rollout, groups=rollout.groups[: 2 - world.rank]), 0)


def test_the_first_rank_logs_its_first_prompts(tmp_path):
    launch(2, tmp_path, {"log": {"log_completions": 1}}, log_on_rank)
    lines = completions(tmp_path)
    assert [line["row"] for line in lines] == [0, 1]
    assert [PIL.Image.open(tmp_path / path).size for line in lines for path in line["images"]] == [(56, 56)] * 2
    assert len([*(tmp_path / "images").iterdir()]) == 2


@pytest.mark.usefixtures("quick")
def test_boxes_are_fractions_of_the_image_size(run, user_data, rows):
    folder = run(*user_data, f"--data.train_file={rows.parent / 'boxes.jsonl'}", *EVERY_STEP[:-1], "--rewards={iou: 1}")
    assert completions(folder)[0]["truth"] == [[0, 0, 0.5, 0.5]]


def test_a_character_of_several_tokens_is_shown_at_its_last_token(checkpoint):
    processor = load_processor(checkpoint)
    ids = processor.tokenizer.encode("a \u4f60!")
    texts = [text for text, _ in tokens(Completion(torch.tensor(ids), torch.full((len(ids),), -0.5)), processor)]
    assert "".join(texts) == "a \u4f60!" and "\ufffd" not in "".join(texts) and len(texts) == len(ids)
