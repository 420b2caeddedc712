"""Test micro-batches with given answers, and pair accuracy on any number of ranks."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.processor import encode_completion
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.monitor.memory.out_of_memory import longest_row
from minivlmrl.tasks.shapes import Shapes
from minivlmrl.trainers import sft as file
from minivlmrl.trainers.registry import find_trainer
from tests.helpers.stages import STAGES, Rows
from tests.helpers.talk import assistant, user


@pytest.mark.parametrize("name, scale, options", [("dpo", 0.1, ["--dpo.ld_alpha=0.5"]), ("reward_model", 1.0, [])])
def test_margins_of_the_evaluation_are_those_of_the_loss(stage, name, scale, options):
    """The option ld_alpha weighs the tokens beyond the shorter answer."""
    rows = Rows(replace(row, rejected=f"{row.rejected} or so") for row in Shapes(12, "other"))
    run = stage(name, *options, held_out=rows)
    run.go(2)
    with torch.no_grad():
        margins = run.trainer.margins(rows)
        _, metrics = run.trainer.loss(run.trainer.micro_batch(rows))
    assert margins.min() < 0 < margins.max()
    assert scale * margins.mean().item() == pytest.approx(metrics["rewards/margins"].item(), rel=1e-9)
    assert run.accuracy() == pytest.approx(metrics["rewards/accuracies"].item())
    assert run.accuracy() != 0.5  # with 0.5, the opposite sign would have the same accuracy


def test_rows_without_both_answers_are_no_pairs(stage):
    trainer = stage("dpo").trainer
    rows = Rows(Shapes(3, "x")[i] for i in range(3))
    rows[0].rejected = rows[1].chosen = None
    assert trainer.shard_rows_with_answers(rows) == ([2], 1)
    assert trainer.evaluate(Rows(rows[:2])) == trainer.evaluate(Rows()) == {}


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_both_answers_share_their_prompt_and_its_image(stage, name):
    for batch, rows in zip(stage(name).next(), ((0, 1), (2, 3)), strict=True):
        assert len(batch.group.layout.prompt_lengths) == len(rows) and len(batch.loss_mask) == 2 * len(rows)
        assert len(batch.group.image_grid_thw) == len(rows)
        assert len(batch.group.pixel_values) == 16 * len(rows)  # an image of 56 x 56 pixels has 4 x 4 patches


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_only_assistant_turns_are_trained(stage, name):
    """The user's turn between two turns of an answer gets no gradient, and its tokens are not counted."""

    class Turns(Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            for name in ("chosen", "rejected", "completion"):
                message = getattr(row, name)
                setattr(row, name, [assistant(message), user("what?"), assistant(message + "!")])
            return row

    run = stage(name, rows=Turns(8, "rows"))
    batches = run.next()
    every = 2 if name == "dpo" else 1
    trained = sum(int(b.loss_mask[::every].sum()) for b in batches)
    assert trained < sum(sum(b.group.layout.row_lengths[::every]) for b in batches)
    assert batches[0].normalizer.tokens == trained
    assert math.isfinite(run.update()["grad_norm"]) and run.number == 1


class Dialogues(Shapes):
    """Rows with two answers, each with a thought."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        for name in ("chosen", "rejected", "completion"):
            answer = getattr(row, name).rpartition("</think>")[2]  # the template would drop a second thought
            first, last = (assistant(f"<think>\n{x}\n</think>\n\n{answer}") for x in ("easy", "hard"))
            setattr(row, name, [first, user(f"what {index}?"), last])
        return row


def by_answer(row):
    """Return a row for each answer of a dialogue, whose prompt has all turns before the answer."""
    rows = []
    for i in (0, 2):
        parts = {name: [getattr(row, name)[i]] for name in ("chosen", "rejected", "completion")}
        rows += [replace(row, messages=[*row.messages, *row.chosen[:i]], **parts)]
    return rows


@pytest.fixture
def drops_thoughts(stage, published):
    """Return a function that builds a stage on dialogues, whose chat template drops thoughts of earlier turns."""

    def build(name):
        run = stage(name, rows=Dialogues(8, "rows"))
        template = ChatTemplate(published("qwen3_5_think"), "t")
        run.trainer.processor = replace(run.trainer.processor, template=template)
        return run

    return build


def test_answers_with_their_own_prompts_are_trained_like_single_answers(drops_thoughts):
    trainer, row = drops_thoughts("sft").trainer, Dialogues(8, "rows")[1]
    batch, single = (trainer.micro_batch(rows) for rows in ([row], by_answer(row)))
    assert (len(batch.loss_mask), len(single.loss_mask)) == (1, 2)
    assert batch.loss_mask.sum() == single.loss_mask.sum() == batch.normalizer.tokens
    losses = [trainer.loss(x)[0] for x in (batch, single)]
    gradients = [torch.autograd.grad(loss, [*trainer.policy.parameters()], allow_unused=True) for loss in losses]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for ours, expected in zip(*gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    assert trainer.evaluate(Rows([row])) == pytest.approx(trainer.evaluate(Rows(by_answer(row))), rel=1e-12)


def test_the_longest_row_of_dialogues_is_measured_if_memory_runs_out(drops_thoughts):
    trainer, row = drops_thoughts("sft").trainer, Dialogues(8, "rows")[1]
    answer = trainer.encode([row])[1][0][0]
    prompt = row.prompt(trainer.processor)
    num_tokens = max(len((turn.prompt or prompt).input_ids) + len(turn.ids) for turn in answer.turns)
    assert longest_row(trainer, [row]) == f"row {row.index} with {num_tokens:,} tokens"


def test_pairs_of_dialogues(drops_thoughts):
    """DPO sums the log-probabilities of all answers, and a reward model scores the last answer after its own prompt."""
    row = Dialogues(8, "rows")[1]
    row.rejected[:2] = row.chosen[:2]
    trainer = drops_thoughts("dpo").trainer
    with torch.no_grad():
        sums = []
        for rows in ([row], by_answer(row)):
            batch = trainer.micro_batch(rows)
            padded = batch.group.pad(per_token_logps(trainer.policy, batch.group)[0])
            sums.append((padded * batch.loss_mask).sum(1).view(-1, 2).sum(0))
        torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-10)
        trainer = drops_thoughts("reward_model").trainer
        scores = [torch.stack(trainer.rewards(trainer.micro_batch(rows))) for rows in ([row], by_answer(row)[1:])]
        torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-10)


def test_equal_rewards_do_not_count_as_correct(stage):
    assert stage("dpo", held_out=Shapes(3, "other")).accuracy() == 0  # the policy still equals the reference


def test_without_a_reference_its_log_ratios_are_0(stage):
    """The loss is -log sigmoid(beta (log pi(chosen) - log pi(rejected))), as in TRL up to 0.28, plus the loss sft."""
    options = "--dpo.reference_free=true", "--dpo.beta=0.3", "--dpo.loss_type=[sigmoid, sft]"
    rows = [replace(row, rejected=f"{row.rejected} or so") for row in Shapes(8, "rows")]
    run = stage("dpo", *options, rows=rows, held_out=Shapes(3, "other"))
    assert run.trainer.reference is None
    batches = run.next()
    losses, all_chosen = [], []
    for batch in batches:
        with torch.no_grad():
            logps = batch.group.pad(per_token_logps(run.model, batch.group)[0])
        chosen, rejected = (logps * batch.loss_mask).sum(1).view(-1, 2).unbind(1)
        losses.append(-logsigmoid(0.3 * (chosen - rejected)))
        all_chosen.append(logps[::2][batch.loss_mask[::2].bool()])
    metrics = run.update()
    expected = torch.cat(losses).mean() - torch.cat(all_chosen).mean()  # sft is a mean over the step's chosen tokens
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert abs(torch.cat(losses).mean() - math.log(2)) > 1e-6 and run.accuracy() is not None


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_loss_of_held_out_rows_is_a_mean_over_their_tokens(stage, monkeypatch, loss_type):
    """Token t gets the log-probability -(t % 7 + 1) / 4, and one row in four has no completion."""
    run = stage("sft", "--sft.micro_batch_size=2", f"--sft.loss_type={loss_type}")
    rows = Rows(Shapes(4, "x")[i] for i in range(4))
    rows[1].completion = None
    rows[3].completion += " and more"
    monkeypatch.setattr(file, "per_token_logps", lambda policy, group: (-(group.completion_ids % 7 + 1) / 4, None))
    ids = [encode_completion(run.trainer.processor, rows[i].messages, rows[i].completion).ids for i in (0, 2, 3)]

    def mean(ids):
        losses = [(t % 7 + 1) / 4 for row in ids for t in row.tolist()]
        return sum(loss * (math.exp(-loss) if loss_type == "dft" else 1) for loss in losses) / len(losses)

    assert run.trainer.evaluate(rows) == {"eval/loss": pytest.approx(mean(ids), rel=1e-12)}
    assert run.trainer.evaluate(Rows([rows[1]])) == {}


@pytest.mark.parametrize("following", STAGES)
def test_a_later_stage_trains_everything_again(stage, following):
    run = stage("dpo", "--model.freeze=[vision]")
    assert not any(p.requires_grad for p in run.model.visual.blocks.parameters())
    first = run.trainer
    first.config.stages = [following]
    first.config.model.freeze = []
    trainer = find_trainer(following, first.config)(first.config, run.model, first.processor, first.world)
    assert all(p.requires_grad for p in run.model.parameters())
    alone = {name for name, p in trainer.trained.named_parameters() if not p.requires_grad}
    assert alone == ({"backbone.lm_head.weight"} if following == "reward_model" else set())
