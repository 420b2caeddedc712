"""Whole training steps equal TRL's, and its trainers' steps, healthy or with a bug put into them, are told apart."""

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
import patients
import trl
from patients import STEPS_OF

from minivlmrl.algorithms.dpo import DPO
from minivlmrl.algorithms.sft import SFT
from minivlmrl.audit.dump import read
from minivlmrl.audit.updates import NAMES, pictures
from minivlmrl.batch import Step
from minivlmrl.generate import Completion
from minivlmrl.grpo import GRPO, Rollout
from minivlmrl.hub.checkpoint import load_model, load_processor
from minivlmrl.rows import Prompt, Row
from minivlmrl.run.config import RunConfig
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.scale.ranks import World
from minivlmrl.train import optimizer_step

SAME = {"learning_rate": 3e-4, "lr_scheduler_type": "constant"}  # the other defaults of both sides are equal, or below
OURS = {**SAME, "adam_beta2": 0.999, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return patients.write_model(tmp_path_factory.mktemp("model"))


def dumped(folder, output, kind, patch=None, late=None, at=0, **options):
    """Train with TRL and read the step `at`."""
    options = {"max_steps": at + 1} | options
    trainer = getattr(patients, kind)(folder, output / "trainer", **options)
    if late:
        late(trainer)
    with STEPS_OF[kind](trainer, output, at + 1):
        trainer.train()
    return read(output / str(at))


def rows_of(d):
    """Prompts, and answers (ids) in the order of the dump."""
    patches, grids = pictures(d)
    real, answer = d["attention_mask"].bool(), d.completion & d["completion_mask"].bool()
    prompts = [
        Prompt(ids[here & ~after], patches[i], grids[i], torch.ones(len(grids[i])))
        for i, (ids, here, after) in enumerate(zip(d["input_ids"], real, d.completion, strict=True))
    ]
    return prompts, [ids[mask] for ids, mask in zip(d["input_ids"], answer, strict=True)]


def step_of(kind, d, folder, **options):
    """The same step by our trainer: weights after it, by the hub's names."""
    run = RunConfig()
    for name, value in (OURS | options).items():
        setattr(getattr(run, kind), name, value)
    run.rewards = {"a": 1.0, "b": 1.0}
    model, processor = load_model(folder, torch.float64), load_processor(folder)
    algorithm = {"grpo": GRPO, "dpo": DPO, "sft": SFT}[kind](run, model, processor, World(0, 1, torch.device("cpu")))
    prompts, answers = rows_of(d)
    if kind == "grpo":
        order = d["row"].argsort().tolist()
        groups = [order[i : i + 4] for i in range(0, len(order), 4)]
        completions = [[Completion(answers[i], torch.zeros(len(answers[i])), True) for i in group] for group in groups]
        rewards = d["rewards"].float()
        rollout = Rollout([Row([], []) for _ in groups], [prompts[group[0]] for group in groups], completions, rewards)
        [batches] = algorithm.pack(rollout)
        algorithm.compute_advantages(rollout, [batches])
        algorithm.fresh, step = True, Step(batches)
    else:
        first = range(len(prompts)) if kind == "sft" else d["chosen"].nonzero()[:, 0].tolist()
        second = {int(p): i for i, p in enumerate(d["pair"].tolist()) if not d["chosen"][i]} if kind == "dpo" else {}
        of = [[i] + ([second[int(d["pair"][i])]] if second else []) for i in first]
        coded = [[(answers[i], torch.ones(len(answers[i]), dtype=torch.bool)) for i in group] for group in of]
        step = algorithm.step([algorithm.pack([prompts[group[0]] for group in of], coded)])
    optimizer_step(algorithm, step, build_optimizer(algorithm.trained, algorithm.config), 0)
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        ("sft", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, {}),
        ("dpo", {"beta": 0.3}, {"beta": 0.3}),
        ("grpo", {"beta": 0.1}, {"beta": 0.1, "num_generations": 4, "prompts_per_step": 2}),
        ("grpo", {"loss_type": "grpo", "scale_rewards": "none"},
         {"loss_type": "grpo", "scale_rewards": "none", "num_generations": 4, "prompts_per_step": 2}),
    ],
)  # fmt: skip
def test_a_whole_step_equals_trls(kind, theirs, ours, folder, tmp_path, monkeypatch):
    """Same weights, completions and rewards: parameters after the step agree within 1e-6; they moved by 3e-4.

    transformers takes norms and rotations in float32, which Adam's first step makes larger where a gradient is near 0.
    """
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", patients.PlainHead)
    norms = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    for name in ("Qwen2_5_VLRMSNorm", "Qwen2RMSNorm"):
        if hasattr(norms, name):
            monkeypatch.setattr(getattr(norms, name), "forward", patients.plain_norm)
    d = dumped(folder, tmp_path, kind, dtype=torch.float64, max_grad_norm=0.5, **SAME, **theirs)
    mine = step_of(kind, d, folder, **ours)
    after = {NAMES.sub("", name): x for name, x in d.parameters("after").items()}
    before = {NAMES.sub("", name): x for name, x in d.parameters("before").items()}
    assert after.keys() == mine.keys()
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    apart = {name: (after[name] - mine[name].detach()).abs().max().item() for name in after}
    print(kind, moved, max(apart.values()), max(apart, key=apart.get))
    assert moved > 2.9e-4 and max(apart.values()) < 1e-6, max(apart.items(), key=lambda item: item[1])
