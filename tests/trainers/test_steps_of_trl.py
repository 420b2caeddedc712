"""Compare the trainers' whole steps with TRL's: the same weights, completions and rewards."""

import pytest
import torch

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
import transformers
import trl

from minivlmrl.config.options import RunConfig
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.families.registry import hub_name
from minivlmrl.run.loop import optimizer_step
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.trainers.base import Rollout, Step
from minivlmrl.trainers.registry import find_trainer
from tests.extras.parity import trl_fixtures

SLOW = pytest.mark.slow
# other defaults are equal in TRL and minivlmrl
SAME = {"learning_rate": 3e-4, "lr_scheduler_type": "constant"}
OURS = {**SAME, "adam_beta2": 0.999}
GROUPS = {"num_generations": 4, "prompts_per_step": 2}
GRPO = {"loss_type": "grpo", "scale_rewards": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_fixtures.write_model(tmp_path_factory.mktemp("model"))


class PlainHead:
    """TRL's fused head, but computed in the hidden states' dtype, not in float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy, squares = -(logps.exp() * logps).sum(-1), (2 * logps).logsumexp(-1)
        return logps.gather(1, labels[:, None])[:, 0], entropy, squares, hidden[:, 0] * 0, logps.argmax(-1) == labels


@pytest.fixture(autouse=True)
def plain_head(monkeypatch):
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", PlainHead)


def plain_norm(self, x):
    """Compute transformers' RMS norm in the hidden states' dtype, not in float32."""
    return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


def rows_of(batch, completion_mask, counted_mask):
    """Return the prompts and completions in a TRL batch, whose rows have one image each."""
    real, grids = batch["attention_mask"].bool(), batch["image_grid_thw"]
    patches = batch["pixel_values"].double().split(grids.prod(1).tolist())
    prompts, completions = [], []
    for i, ids in enumerate(batch["input_ids"]):
        own = real[i] & completion_mask[i]
        prompts.append(Prompt(ids[real[i] & ~own], patches[i], grids[i : i + 1], torch.ones(1)))
        completions.append(Completion(ids[own], torch.zeros(int(own.sum())), policy_mask=counted_mask[i, own]))
    return prompts, completions


def step_of(kind, d, folder, **options):
    """Repeat a dumped step with minivlmrl's trainer, and return the parameters after the step."""
    run = RunConfig()
    for name, value in (OURS | options).items():
        setattr(getattr(run, kind), name, value)
    # as many rewards as in the dump
    run.rewards, run.optimizer.max_grad_norm = {"accuracy": 1.0, "format": 1.0}, 0.5
    model, processor = load_model(folder, torch.float64), load_processor(folder)
    trainer = find_trainer(kind, run)(run, model, processor, World())
    prompts, answers = rows_of(d, ~d["prompt_mask"].bool(), d["completion_mask"].bool())
    groups = [[i] for i in range(len(prompts))]
    if kind == "grpo":
        groups = d["row"].argsort().view(-1, 4).tolist()
    elif kind == "dpo":
        pairs = [d["pair"] + len(prompts) * d["micro_batch"], -d["chosen"]]
        order = sorted(range(len(prompts)), key=lambda i: [int(x[i]) for x in pairs])
        groups = [order[i : i + 2] for i in range(0, len(order), 2)]
    prompts = [prompts[group[0]] for group in groups]
    completions = [[answers[i] for i in group] for group in groups]
    if kind == "grpo":
        rollout = Rollout.join([Row([], []) for _ in groups], prompts, completions, d["rewards"].float())
        step = Step(*trainer.prepare(rollout, [rollout.groups]))
    else:
        step = trainer.step([trainer.pack(prompts, completions)])
    optimizer_step(trainer, step, build_optimizer(trainer.trained, trainer.config, trainer.run.optimizer), 0)
    return dict(model.named_parameters())


def forced(trainer):
    """Give a TRL trainer a tool_mask that marks some completion tokens as tool responses."""
    generate = trainer._generate

    def masked(*given, **named):
        found = list(generate(*given, **named))
        found[2] = [[int(not 1 <= i % 5 < 3) for i in range(len(ids))] for ids in found[1]]
        return tuple(found)

    trainer._generate = masked


@pytest.mark.parametrize(("kind", "trl_options", "our_options"), [
    ("grpo", {"beta": 0.1, "late": forced}, {"beta": 0.1, **GROUPS}),
    pytest.param("sft", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, {}, marks=SLOW),
    pytest.param("dpo", {"beta": 0.3}, {"beta": 0.3}, marks=SLOW),
    pytest.param("grpo", GRPO, GRPO | GROUPS, marks=SLOW),
])  # fmt: skip
def test_a_whole_step_equals_trls(kind, trl_options, our_options, folder, tmp_path, monkeypatch):
    """Parameters move by 3e-4 and agree within 1e-6, because Adam's first step amplifies their float32 rounding."""
    norms = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    for name in ("Qwen2_5_VLRMSNorm", "Qwen2RMSNorm"):
        if hasattr(norms, name):
            monkeypatch.setattr(getattr(norms, name), "forward", plain_norm)
    options = {"dtype": torch.float64, "max_grad_norm": 0.5} | SAME | trl_options
    d = trl_fixtures.dumped(folder, tmp_path, kind, **options)
    if "late" in trl_options:
        assert 0 < d["completion_mask"].sum() < (d["attention_mask"] * (1 - d["prompt_mask"])).sum()
    parameters = step_of(kind, d, folder, **our_options)
    after = {hub_name(name.removeprefix("module.")): x for name, x in d.parameters("after").items()}
    before = {hub_name(name.removeprefix("module.")): x for name, x in d.parameters("before").items()}
    assert after.keys() == parameters.keys()
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    apart = {name: (after[name] - parameters[name].detach()).abs().max().item() for name in after}
    assert moved > 2.9e-4 and max(apart.values()) < 1e-6, max(apart.items(), key=lambda item: item[1])
