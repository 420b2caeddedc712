"""Audit training steps of TRL with and without planted bugs."""

import copy
from contextlib import suppress

import pytest
import torch

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
from minivlmrl.extras.parity.audit import audit, report
from minivlmrl.extras.parity.change import Change
from minivlmrl.extras.parity.search import LOGPS, STAGES, possible_bugs
from minivlmrl.extras.parity.step import read
from minivlmrl.model.checkpoint import load_model
from tests.extras.parity import bugs
from tests.record import trl_fixtures
from tests.record.trl_fixtures import STEPS_OF, dumped, step_with

BUGS = bugs.TRL_BUGS | bugs.UNSEEN_BUGS
QUICK = ("kl_reversed", "dropped_gradients", "tool_responses_in_the_loss")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_fixtures.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in BUGS])
def test_a_bug_is_named(name, folder, tmp_path, monkeypatch):
    bug = BUGS[name]
    d = step_with(bug, folder, tmp_path, monkeypatch.setattr)
    wrong = [finding for finding in audit(d) if not (finding.ok or finding.again)]
    assert wrong[0].stage == bug.stage and (len(wrong) == 1 or not bug.cause), report(wrong, d)
    shown = wrong[0].explained[: 1 if name in bugs.UNSEEN_BUGS else 4]
    is_named = any(all(part in cause.says for part in bug.cause.split(", ")) for cause in shown)
    assert is_named if bug.cause else not shown, report(wrong, d)


@pytest.mark.slow
def test_every_cause_can_be_computed_on_some_step(folder, tmp_path, monkeypatch):
    """The forward pass of the model is a stub, because only the formulas of causes are computed."""
    several, never = {"per_device_train_batch_size": 4, "rows": 8}, {}
    steps = [("turns", {"beta": 0.04, "weight_decay": 0.1, "at": 1, **OFF}), ("dpo", several), ("sft", {})]
    model = load_model(folder, torch.float64)
    # a copy, because some causes change the model
    monkeypatch.setattr("minivlmrl.model.checkpoint.load_model", lambda *_: copy.deepcopy(model))
    monkeypatch.setattr(type(model), "__call__", lambda self, batch, select: torch.zeros(
        len(select), self.lm_head.in_features, dtype=torch.float64))  # fmt: skip
    for kind, options in steps:
        d = dumped(folder, tmp_path / kind, kind, **options)
        for name, stage in STAGES.items():
            d.part = torch.arange(1) if name in LOGPS else None
            for cause in possible_bugs(name, d) if stage(d, Change(d, {})) else ():
                # the answer stays True if a loss raises ValueError, for example for answers without a token
                answer = True
                if never.get((name, cause.says), True):
                    with suppress(ValueError):
                        answer = stage(d, Change(d, (cause.with_number(1.0) if cause.is_fitted else cause).change))
                never[name, cause.says] = answer is None
    assert len(never) > 1000 and not any(never.values()), [of for of, empty in never.items() if empty]


def test_label_smoothing_is_rejected_and_the_sampler_is_compared(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`parity` does not support label smoothing"):
        STEPS_OF["sft"](trl_fixtures.sft(folder, tmp_path / "sft", label_smoothing_factor=0.1), tmp_path)
    with pytest.raises(ValueError, match=r"`parity` does not support losses with entropies\. Set entropy_coef to 0"):
        STEPS_OF["grpo"](trl_fixtures.grpo(folder, tmp_path / "entropy", entropy_coef=0.1), tmp_path)
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
    assert [finding.stage for finding in audit(d) if not finding.ok] == ["logps of sampler"]


OFF = {"num_iterations": 2, "rows": 8}  # the second step is off-policy
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "learning_rate": 1e-2}
# no images, because TRL 1.16 cannot mask truncated completions with images
TELL = {"tools": ("tell",)}
# options under which all stages agree; tests/parity compares all types of losses
HEALTHY = {
    "grpo": [
        {"loss_type": "grpo"}, {"temperature": 1.7, "top_k": 5, "beta": 0.3, "use_bias_correction_kl": False},
        {"learning_rate": 0.0}, {"beta": 0.1, **OFF, **SYNCED},
        {"gradient_accumulation_steps": 1, "num_generations": 2}, {"max_completion_length": 1, "beta": 0.1},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 8},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "rows": 8, "beta": 0.1, "learning_rate": 1e-2},
        {"bf16": True, "beta": 0.1, **OFF},
        # the padding after a truncated completion has the id of a stop token
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
        assert ("note: the model ran in bfloat16 (autocast)" in report(findings, d)) == ("bf16" in options)


def test_forwards_with_attention_dropout_are_not_compared(folder, tmp_path):
    """Dropout cannot be repeated, so log-probabilities and gradients are not compared."""

    def drop(trainer):
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2

    findings = audit(dumped(folder, tmp_path, "grpo", drop))
    assert all(finding.ok for finding in findings)
    assert not {"logps", "logps of old", "gradients"} & {finding.stage for finding in findings}
