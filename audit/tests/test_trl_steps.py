"""Compare whole training steps with TRL's, and audit steps of TRL with and without bugs."""

import copy
from contextlib import suppress

import pytest
import torch

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
import bugs
import transformers
import trl
import trl_fixtures
from oracle import in_float64
from trl_fixtures import STEPS_OF

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.families.registry import hub_name
from minivlmrl.run.loop import optimizer_step
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.trainers.base import Rollout, Step
from minivlmrl.trainers.dpo import DPOTrainer
from minivlmrl.trainers.grpo import GRPOTrainer
from minivlmrl.trainers.registry import find_trainer
from minivlmrl.trainers.sft import SFTTrainer
from minivlmrl_audit.audit import LOGPS, STAGES, audit, main, possible_causes, report
from minivlmrl_audit.dump import read
from minivlmrl_audit.perturbations import Change
from minivlmrl_audit.step_checks import shown

BUGS = bugs.TRL_BUGS
QUICK = ("kl_reversed", "dropped_gradients", "tool_responses_in_the_loss")
SLOW = pytest.mark.slow
# other defaults are equal in TRL and minivlmrl
SAME = {"learning_rate": 3e-4, "lr_scheduler_type": "constant"}
OURS = {**SAME, "adam_beta2": 0.999}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_fixtures.write_model(tmp_path_factory.mktemp("model"))


def dumped(folder, output, kind, late=None, at=0, **options):
    """Train with TRL and read the step `at`."""
    trl_fixtures.train(kind, folder, output, at + 1, late, **options)
    return read(output / str(at))


def rows_of(d):
    """Return the prompts and completions of a dumped step, in its order.

    Tokens that are not in the loss get policy_mask 0.
    """
    patches, grids = zip(*((own[0][0], own[0][1][None]) for own in shown(d)), strict=True)  # each row has one picture
    real, counted = d["attention_mask"].bool(), d["completion_mask"].bool()
    prompts = [
        Prompt(ids[here & ~after], patches[i], grids[i], torch.ones(len(grids[i])))
        for i, (ids, here, after) in enumerate(zip(d["input_ids"], real, d.completion, strict=True))
    ]
    of = zip(d["input_ids"], counted, d.completion & real, strict=True)
    return prompts, [Completion(ids[own], torch.zeros(int(own.sum())), policy_mask=mask[own]) for ids, mask, own in of]


def step_of(kind, d, folder, **options):
    """Repeat a dumped step with minivlmrl's trainer, and return the parameters after the step."""
    run = RunConfig()
    for name, value in (OURS | options).items():
        setattr(getattr(run, kind), name, value)
    # as many rewards as in the dump
    run.rewards, run.optimizer.max_grad_norm = {"accuracy": 1.0, "format": 1.0}, 0.5
    model, processor = load_model(folder, torch.float64), load_processor(folder)
    cls = {"grpo": GRPOTrainer, "dpo": DPOTrainer, "sft": SFTTrainer}[kind]
    trainer = cls(run, model, processor, World())
    prompts, answers = rows_of(d)
    if kind == "grpo":
        order = d["row"].argsort().tolist()
        groups = [order[i : i + 4] for i in range(0, len(order), 4)]
        completions = [[answers[i] for i in group] for group in groups]
        rewards = d["rewards"].float()
        rows = [Row([], []) for _ in groups]
        rollout = Rollout.join(rows, [prompts[group[0]] for group in groups], completions, rewards)
        step = Step(*trainer.prepare(rollout, [rollout.groups]))
    else:
        first = range(len(prompts)) if kind == "sft" else d["chosen"].nonzero()[:, 0].tolist()
        second = {int(p): i for i, p in enumerate(d["pair"].tolist()) if not d["chosen"][i]} if kind == "dpo" else {}
        of = [[i] + ([second[int(d["pair"][i])]] if second else []) for i in first]
        coded = [[answers[i] for i in group] for group in of]
        step = trainer.step([trainer.pack([prompts[group[0]] for group in of], coded)])
    optimizer_step(trainer, step, build_optimizer(trainer.trained, trainer.config, trainer.run.optimizer), 0)
    return dict(model.named_parameters())


def encoded(inputs):
    """Convert a batch of TRL's collator to prompts and completions of minivlmrl."""
    ends, grids = inputs["image_grid_thw"].prod(1).cumsum(0).tolist(), inputs["image_grid_thw"]
    prompts, answers = [], []
    for i, (ids, real) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)):
        after = inputs["completion_mask"][i].bool()
        patches = inputs["pixel_values"][[0, *ends][i] : ends[i]].double()
        prompts.append(Prompt(ids[real & ~after], patches, grids[i : i + 1], torch.ones(1)))
        answers.append([Completion(ids[after])])
    return prompts, answers


def forced(trainer):
    """Give a TRL trainer a tool_mask that marks some tokens of completions as tool responses."""
    generate = trainer._generate

    def masked(*given, **named):
        found = list(generate(*given, **named))
        found[2] = [[int(not 1 <= i % 5 < 3) for i in range(len(ids))] for ids in found[1]]
        return tuple(found)

    trainer._generate = masked


@pytest.mark.parametrize(("kind", "trl_options", "our_options"), [
    ("grpo", {"beta": 0.1, "late": forced}, {"beta": 0.1, "num_generations": 4, "prompts_per_step": 2}),
    pytest.param("sft", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, {}, marks=SLOW),
    pytest.param("dpo", {"beta": 0.3}, {"beta": 0.3}, marks=SLOW),
    pytest.param("grpo", {"loss_type": "grpo", "scale_rewards": "none"},
     {"loss_type": "grpo", "scale_rewards": "none", "num_generations": 4, "prompts_per_step": 2}, marks=SLOW),
])  # fmt: skip
def test_a_whole_step_equals_trls(kind, trl_options, our_options, folder, tmp_path, monkeypatch):
    """With the same weights, completions and rewards, parameters after a step agree within 1e-6.

    The step changes parameters by 3e-4. The difference is not smaller, because transformers computes norms and
    rotations in float32, and Adam's first step amplifies rounding errors of gradients near 0.
    """
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", trl_fixtures.PlainHead)
    norms = transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    for name in ("Qwen2_5_VLRMSNorm", "Qwen2RMSNorm"):
        if hasattr(norms, name):
            monkeypatch.setattr(getattr(norms, name), "forward", trl_fixtures.plain_norm)
    options = {"dtype": torch.float64, "max_grad_norm": 0.5} | SAME | trl_options
    d = dumped(folder, tmp_path, kind, **options)
    if "late" in trl_options:
        assert 0 < d["completion_mask"].sum() < (d["attention_mask"].bool() & d.completion).sum()
    parameters = step_of(kind, d, folder, **our_options)
    after = {hub_name(name.removeprefix("module.")): x for name, x in d.parameters("after").items()}
    before = {hub_name(name.removeprefix("module.")): x for name, x in d.parameters("before").items()}
    assert after.keys() == parameters.keys()
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    apart = {name: (after[name] - parameters[name].detach()).abs().max().item() for name in after}
    assert moved > 2.9e-4 and max(apart.values()) < 1e-6, max(apart.items(), key=lambda item: item[1])


def test_steps_of_kto_equal_trls(folder, tmp_path, monkeypatch):
    """Losses, KLs and weights equal those of TRL's KTOTrainer in three steps.

    The KL uses the same mismatched pairs of prompts and answers as TRL.
    """
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", trl_fixtures.PlainHead)
    in_float64(monkeypatch, "qwen2_5_vl")
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 3, "max_grad_norm": 0.5}
    trainer = trl_fixtures.kto(folder, tmp_path / "trainer", 12, torch.float64, **options, **SAME, logging_steps=1)
    trainer.ref_model.double()
    batches, compute = [], trainer._compute_loss
    monkeypatch.setattr(trainer, "_compute_loss", lambda model, inputs, *rest: (
        batches.append(inputs), compute(model, inputs, *rest))[1])  # fmt: skip
    trainer.train()
    run = load_config("shapes_kto.yaml", ["--kto={prompts_per_step: 4}", "--optimizer.max_grad_norm=0.5"])
    for name, value in OURS.items():
        setattr(run.kto, name, value)
    model, processor = load_model(folder, torch.float64), load_processor(folder)
    our_trainer = find_trainer("kto", run)(run, model, processor, World())
    optimizer, lines = build_optimizer(our_trainer.trained, run.kto, run.optimizer), []
    for number, inputs in enumerate(batches):
        monkeypatch.setattr(our_trainer, "encode", lambda rows, inputs=inputs: encoded(inputs))
        labelled_rows = [Row([], [], {"label": good}) for good in inputs["label"]]
        step = next(our_trainer.steps(iter([labelled_rows])))
        lines.append(optimizer_step(our_trainer, step, optimizer, number))
    trl_lines = [line for line in trainer.state.log_history if "kl" in line]
    assert lines[-1]["kl"] > 0.1
    for ours, line in zip(lines, trl_lines, strict=True):
        assert ours["loss"] == pytest.approx(line["loss"], rel=1e-6)  # TRL logs the loss in float32
        for name in ("kl", "rewards/chosen", "rewards/rejected"):
            assert ours[name] == pytest.approx(line[name], rel=1e-9)
    after = {hub_name(name.removeprefix("module.")): x for name, x in trainer.model.named_parameters()}
    assert max((after[name] - x).abs().max().item() for name, x in model.named_parameters()) < 1e-9


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in QUICK else SLOW) for name in BUGS
])  # fmt: skip
def test_a_bug_is_named(name, folder, tmp_path, monkeypatch):
    """A bug in TRL makes one stage differ, and one of the printed explanations names the bug."""
    bug = BUGS[name]
    d = trl_fixtures.step_with([bug], folder, tmp_path, monkeypatch.setattr)
    wrong = [finding for finding in audit(d) if not (finding.ok or finding.again)]
    assert len(wrong) == 1 and wrong[0].stage == bug.stage, report(wrong, d)
    assert is_named(bug, wrong[0]), report(wrong, d)


def test_a_k3_that_keeps_its_digits_agrees(folder, tmp_path, monkeypatch):
    """The same step as k3_by_exp's, with expm1."""
    right = "torch.expm1(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps)"
    bugs.loss("", bugs.K3, right).patch(monkeypatch.setattr, None)
    d = dumped(folder, tmp_path, "grpo", at=1, **BUGS["k3_by_exp"].options)
    findings = audit(d)
    assert all(finding.ok for finding in findings), report(findings, d)
    assert not d["advantages"].any() and d["ref_per_token_logps"].ne(d["per_token_logps"]).any()


def is_named(bug, finding):
    parts = bug.cause.split(", ")
    return any(all(part in cause.says for part in parts) for cause in finding.explained[:4])


@pytest.mark.parametrize("names", [
    ("std_with_n", "divided_twice"),
    pytest.param(("padding_counted", "merger_twice"), marks=SLOW),
    pytest.param(("tower_never_decays", "tower_clipped_apart"), marks=SLOW),
    pytest.param(("reward_weights_ignored", "never_clipped"), marks=SLOW),
])  # fmt: skip
def test_bugs_of_two_stages_are_both_named(names, folder, tmp_path, monkeypatch):
    pair = [BUGS[name] for name in names]
    d = trl_fixtures.step_with(pair, folder, tmp_path, monkeypatch.setattr)
    wrong = {finding.stage: finding for finding in audit(d) if not (finding.ok or finding.again)}
    assert wrong.keys() == {bug.stage for bug in pair}, report(wrong.values(), d)
    assert all(is_named(bug, wrong[bug.stage]) for bug in pair), report(wrong.values(), d)


@pytest.mark.slow
def test_every_cause_can_be_computed_on_some_step(folder, tmp_path, monkeypatch):
    """The formula of every cause can be computed on a step. The model's forward is a stub."""
    several, never = {"per_device_train_batch_size": 4, "rows": 8}, {}
    steps = [("turns", {"beta": 0.04, "weight_decay": 0.1, "at": 1, **OFF}), ("dpo", several), ("sft", {})]
    model = load_model(folder, torch.float64)
    monkeypatch.setattr(
        "minivlmrl_audit.optimizer_checks.load_model", lambda *_: copy.deepcopy(model)
    )  # a copy, because some causes change the model
    monkeypatch.setattr(type(model), "__call__", lambda self, batch, select: torch.zeros(
        len(select), self.lm_head.in_features, dtype=torch.float64))  # fmt: skip
    for kind, options in steps:
        d = dumped(folder, tmp_path / kind, kind, **options)
        for name, stage in STAGES.items():
            d.part = torch.arange(1) if name in LOGPS else None
            for cause in possible_causes(name, d) if stage(d, Change(d, {})) else ():
                # stays True if a loss raises ValueError, for example for answers without a token
                answer = True
                if never.get((name, cause.says), True):
                    with suppress(ValueError):
                        answer = stage(d, Change(d, cause.change))
                never[name, cause.says] = answer is None
    assert len(never) > 1000 and not any(never.values()), [of for of, empty in never.items() if empty]


def test_under_autocast_a_bug_is_named_and_the_tolerance_noted(folder, tmp_path, monkeypatch):
    """TRL's default is bf16. What went through the model is compared with less accuracy, all else as before."""
    BUGS["divided_twice"].patch(monkeypatch.setattr, None)
    d = dumped(folder, tmp_path, "grpo", bf16=True)
    findings = audit(d)
    assert [finding.stage for finding in findings if not finding.ok] == ["loss"], report(findings, d)
    assert {"logps", "entropies", "gradients"} < {finding.stage for finding in findings}
    assert is_named(BUGS["divided_twice"], next(finding for finding in findings if not finding.ok))
    assert "note: the model ran in bfloat16 (autocast), so log-probabilities agree if" in report(findings, d)


def test_label_smoothing_is_rejected_and_the_sampler_is_compared(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the audit does not support label smoothing"):
        STEPS_OF["sft"](trl_fixtures.sft(folder, tmp_path / "sft", label_smoothing_factor=0.1), tmp_path)
    trainer = trl_fixtures.grpo(folder, tmp_path / "grpo")
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
        with pytest.raises(ValueError, match="mixed precision is fp16, but it must be no or bf16"):
            STEPS_OF["grpo"](trainer, tmp_path)
    bugs.around(None, "_generate_and_score_completions", lambda score, inputs: (
        (rows := score(inputs)) | {"sampling_per_token_logps": -torch.ones(rows["completion_ids"].shape)}
    ))(monkeypatch.setattr, trainer)  # fmt: skip
    trainer.args.generation_kwargs = {"top_k": 7}
    with STEPS_OF["grpo"](trainer, tmp_path):
        trainer.train()
    d = read(tmp_path / "0")
    assert (d.about["top_k"], d.about["top_p"]) == (7, 1.0)
    findings = audit(d)
    assert [finding.stage for finding in findings if not finding.ok] == ["logps of sampler"]


OFF = {"num_iterations": 2, "rows": 8}  # the second step is off-policy
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "learning_rate": 1e-2}
# no images, because TRL 1.16 cannot mask truncated completions with images
TELL = {"tools": ("tell",)}
# audit/false_positives.py draws other settings, and tests/parity compares all loss types
HEALTHY = {
    "grpo": [
        {"loss_type": "grpo"}, {"temperature": 1.7, "top_k": 5, "beta": 0.3}, {"learning_rate": 0.0},
        {"use_bias_correction_kl": False, "beta": 0.2, **OFF}, {"beta": 0.1, **OFF, **SYNCED},
        {"gradient_accumulation_steps": 1, "num_generations": 2}, {"max_completion_length": 1, "beta": 0.1},
        {"gradient_accumulation_steps": 4, "rows": 8, "use_adaptive_entropy": True, "entropy_target": 9.0},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 8},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "rows": 8, "beta": 0.1, "learning_rate": 1e-2},
        {"bf16": True, "beta": 0.1, **OFF},
        # the padding after a truncated completion has the id of a stop token
        {"pad_to_multiple_of": 8, "max_completion_length": 4},
        {"pad_to_multiple_of": 8, "max_completion_length": 4, "mask_truncated_completions": True},
    ],
    "dpo": [
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "ld_alpha": 0.5}, SYNCED,
        {"bf16": True},
    ],
    "sft": [{}, {"neftune_noise_alpha": 5}, {"completion_only_loss": False}],
    "turns": [
        {}, {"calls": 0.0}, {"calls": 1.0, "max_tool_calling_iterations": 1}, {"max_completion_length": 75},
        {"tools": ("look",), "beta": 0.04}, {"ends": 0.3, "mask_truncated_completions": True, **TELL},
        {"importance_sampling_level": "sequence", **OFF}, {"loss_type": "cispo", "large": True, **OFF},
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind, options", [
    pytest.param(kind, options, marks=SLOW if number else [])
    for kind, some in HEALTHY.items() for number, options in enumerate(some)
])  # fmt: skip
def test_no_alarm_in_steps_without_a_bug(kind, options, folder, tmp_path):
    """The audit reports no difference in two training steps of TRL without a bug."""
    trl_fixtures.train(kind, folder, tmp_path, 2, seed=len(str(options)), **options)
    for step in range(2):
        d = read(tmp_path / str(step))
        findings = audit(d)
        assert all(finding.ok for finding in findings), report(findings, d)
        stages = {finding.stage for finding in findings}
        assert {"loss", "clip", "update", "schedule"} <= stages
        assert options.get("beta") is None or kind != "grpo" or "logps of reference" in stages
        # NEFTune's noise cannot be sampled again
        assert ("gradients" in stages) == ("neftune_noise_alpha" not in options)


def test_forwards_with_attention_dropout_are_not_compared(folder, tmp_path):
    """Log-probabilities and gradients are not compared, because dropout cannot be repeated."""

    def drop(trainer):
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2

    findings = audit(dumped(folder, tmp_path, "grpo", drop))
    assert all(finding.ok for finding in findings)
    assert not {"logps", "logps of old", "gradients"} & {finding.stage for finding in findings}


def test_the_audit_command(folder, tmp_path, capsys, monkeypatch):
    """The command prints the cause of a bug, returns 1, and raises for a folder without a step."""
    BUGS["divided_twice"].patch(monkeypatch.setattr, None)
    dumped(folder, tmp_path, "grpo")
    assert main([str(tmp_path / "0")]) == 1
    out = capsys.readouterr().out
    assert "loss                 DIFFERS" in out and "0.5 times as large: 1 over the 2 micro-batches" in out
    assert "no known cause" not in out and "not in this step: tokens, pictures, logps of old, logps of sampler" in out
    with pytest.raises(ValueError, match=r"nowhere is not a dumped step, because it does not contain step\.json"):
        main([str(tmp_path / "nowhere")])
