"""Compare the losses of public projects with losses of TRL; docs/losses_of_the_field.md has the results.

The loss functions are read from a project's source files, so that neither the project's package nor its dependencies
need to be installed.
"""

import __future__

import ast
import enum
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from torch.nn import functional as F

from minivlmrl.extras.parity.loss import Verdict, judge

GRPO = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "whole_step": True}
# for each loss in docs/losses_of_the_field.md, the options that select the test cases recorded from TRL
LOSSES = {
    "GRPO": GRPO,
    "GRPO, k3": GRPO | {"beta": 0.1, "use_bias_correction_kl": False},
    "GRPO, weighted k3": GRPO | {"beta": 0.1, "use_bias_correction_kl": True},
    "DAPO": GRPO | {"loss_type": "dapo"},
    "Dr. GRPO": GRPO | {"loss_type": "dr_grpo"},
    "GSPO": GRPO | {"importance_sampling_level": "sequence"},
    "CISPO": GRPO | {"loss_type": "cispo"},
    "SAPO": GRPO | {"loss_type": "sapo"},
    "DPO": {"kind": "dpo", "loss_type": "sigmoid"},
    "IPO": {"kind": "dpo", "loss_type": "ipo"},
    "SFT": {"kind": "sft", "loss_type": "nll"},
}


class Settings(SimpleNamespace):
    """A stub with arbitrary attributes, which stands in for a project's config, trainer or base class."""

    def __init_subclass__(cls, **_):
        pass

    def get(self, name: str, default=None):
        return getattr(self, name, default)


@dataclass
class Project:
    """A public project: the files with its loss functions, and adapters that call these functions.

    An adapter gets the project's functions, a batch and options, and returns a loss. `check` in loss.py describes the
    options. The batch has advantages (B, T), and logps, old, ref and mask, (B, T), or (B, 2, T) for preferences.
    """

    source: str  # package on PyPI or repository
    tried: str  # version, or commit and date, of the table
    files: str  # "FILE: NAMES; FILE: NAMES", where names are those of functions, classes or methods (Class.method)
    adapters: dict[Callable, str]  # losses that each adapter computes, separated by "; "
    modules: str = ""  # names by which the functions call each other's modules
    others: dict = field(default_factory=dict)  # further global names that the functions need

    def functions(self) -> list[tuple[str, list[str]]]:
        """List the project's source files, each with the names of the loss functions in the file."""
        parts = [text.partition(": ") for text in self.files.split("; ")]
        return [(file, names.split()) for file, _, names in parts]


def read_functions(project: Project, folder: Path) -> SimpleNamespace:
    """Compile a project's functions from its files, without decorators and annotations."""
    theirs = SimpleNamespace(torch=torch, nn=torch.nn, F=F, math=math, np=numpy, enum=enum, **project.others)
    vars(theirs).update(dict.fromkeys(project.modules.split(), theirs))
    for file, names in project.functions():
        found = sorted(folder.rglob(file), key=lambda path: len(path.parts))
        if not found:
            raise ValueError(f"{folder} has no file {file}; give the folder of a clone or of an unpacked wheel")
        nodes = definitions(ast.parse(found[0].read_text()).body)
        for parent, node in list(nodes.items()):
            nodes |= {f"{parent}.{name}": method for name, method in definitions(node.body).items()}
        for name in names:
            if name not in nodes:
                raise ValueError(f"{found[0]} has no {name}; the table was made with {project.source} {project.tried}")
            nodes[name].decorator_list = []
            code = compile(
                ast.Module([nodes[name]], []), str(found[0]), "exec", __future__.annotations.compiler_flag
            )  # annotations, which need imports, are not evaluated
            exec(code, vars(theirs))
    return theirs


def definitions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def judge_project(name: str, folder: str | Path, seconds: float = 10.0) -> dict[str, Verdict]:
    """Compare all losses of a public project with values and gradients recorded from TRL.

    Args:
        name: key of PROJECTS.
        folder: clone or unpacked wheel with the project's files.
        seconds: time for the search of each loss.
    """
    project = PROJECTS[name]
    theirs = read_functions(project, Path(folder))
    verdicts = {}
    for adapter, losses in project.adapters.items():
        for loss in losses.split("; "):
            verdicts[loss] = judge(as_loss(adapter, theirs), tolerance=1e-5, seconds=seconds, **LOSSES[loss])
    return verdicts


def as_loss(adapter: Callable, theirs: SimpleNamespace) -> Callable:
    """Wrap a public project's loss as a function of a batch and options, which `parity` can check."""

    def loss(batch, options):
        b = SimpleNamespace(logps=batch["per_token_logps"], mask=batch["mask"])
        b.old, b.ref = batch.get("old_per_token_logps"), batch.get("ref_per_token_logps")
        if "advantages" in batch:
            b.advantages = batch["advantages"][:, None].expand_as(b.mask)
        return adapter(theirs, b, SimpleNamespace(**options))

    return loss


def section(name: str, verdicts: dict[str, Verdict]) -> str:
    """Return the Markdown section about a project: its files, and a table with the result for each loss."""
    project = PROJECTS[name]
    adapters = ", ".join(f"`{adapter.__name__}`" for adapter in project.adapters)
    files = "; ".join(f"`{'`, `'.join(names)}` from {file}" for file, names in project.functions())
    rows = []
    for loss, verdict in verdicts.items():
        findings = [line for line in verdict.names if line.startswith(("mistake", "design"))]
        unnamed = ["agrees"] if not verdict.differences else ["no name"]
        agreeing = verdict.cases - len(verdict.differences)
        rows.append(f"| {loss} | {agreeing} of {verdict.cases} | {'; '.join(findings or unnamed)} |")
    head = f"{project.source}, {project.tried}; adapter {adapters}. The functions are {files}.\n"
    return "\n".join([f"### {name}\n", head, "| loss | cases that agree | finding |", "|---|---|---|", *rows])


def is_sequence(o: SimpleNamespace) -> bool:
    return o.importance_sampling_level == "sequence"


def sums(b: SimpleNamespace) -> list[torch.Tensor]:
    """Return four tensors (B,): chosen and rejected log-probabilities of the policy, then of the reference."""
    return [x[:, i] for x in ((b.logps * b.mask).sum(-1), (b.ref * b.mask).sum(-1)) for i in (0, 1)]


def verl(theirs, b, o):
    """Call verl's policy losses with verl's default dual clip of 3."""
    averages = {"dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean", "cispo": "token-mean"}
    mode = averages.get(o.loss_type, "seq-mean-token-mean")
    batch = {"batch_num_tokens": o.tokens, "global_batch_size": len(b.mask)}
    batch["loss_scale_factor"] = o.max_completion_length
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": o.epsilon_low, "clip_ratio_high": o.epsilon_high}
    config = Settings(**bounds, global_batch_info=batch, tau_pos=1.0, tau_neg=1.05)
    name = "gspo" if is_sequence(o) else o.loss_type if o.loss_type in ("cispo", "sapo") else "vanilla"
    policy_loss = getattr(theirs, f"compute_policy_loss_{name}")
    loss = policy_loss(b.old, b.logps, b.advantages, b.mask, mode, config)[0]
    if o.beta:
        kl = theirs.kl_penalty(b.logps, b.ref, "low_var_kl")
        loss = loss + o.beta * theirs.agg_loss(kl, b.mask, mode, **batch)
    return loss


def easyr1(theirs, b, o):
    """Call EasyR1's policy losses with EasyR1's default dual clip of 3."""
    mode = "token" if o.loss_type in ("dapo", "cispo") else "seq"
    name = "gspo" if is_sequence(o) else o.loss_type if o.loss_type in ("cispo", "sapo") else "default"
    bounds = (o.epsilon_low, o.epsilon_high, 3.0, 1.0, 1.05)
    loss = theirs.compute_policy_loss(b.old, b.logps, b.advantages, b.mask, *bounds, name, mode)[0]
    if o.beta:
        loss = loss + o.beta * theirs.average_loss(theirs.compute_kl(b.logps, b.ref, "low_var_kl"), b.mask, mode)
    return loss


def openrlhf(theirs, b, o):
    is_token = o.loss_type == "dapo"
    policy_loss = theirs.PolicyLoss(
        o.epsilon_low, o.epsilon_high, token_level_loss=is_token, policy_loss_type="gspo" if is_sequence(o) else "ppo"
    )
    batch = {"batch_num_tokens": o.tokens, "global_batch_size": len(b.mask)}
    loss = policy_loss(b.logps, b.old, b.advantages, b.mask, **batch)[0]
    if o.beta:
        kl = theirs.compute_approx_kl(b.logps, b.ref, kl_estimator="k3")
        loss = loss + o.beta * theirs.aggregate_loss(kl, b.mask, is_token, **batch)
    return loss


def openrlhf_sft(theirs, b, o):
    return theirs.SFTLoss()(b.logps, b.mask)


def openrlhf_dpo(theirs, b, o):
    return theirs.DPOLoss(o.beta, o.label_smoothing, ipo=o.loss_type == ["ipo"])(*sums(b))[0]


def rlhf_book(theirs, b, o):
    name = "GSPO" if is_sequence(o) else o.loss_type.upper()
    settings = {"clip_eps_lo": o.epsilon_low, "clip_eps_hi": o.epsilon_high, "beta": o.beta, "kl_estimator": "kl3"}
    loss = getattr(theirs, f"{name}Loss")(**settings, sapo_temp_pos=1.0, sapo_temp_neg=1.05)
    experience = Settings(log_probs_old=b.old, log_probs_ref=b.ref, advantages=b.advantages, action_mask=b.mask)
    return loss(b.logps, experience)


def rlhf_book_dpo(theirs, b, o):
    loss = theirs.IPOLoss(o.beta) if o.loss_type == ["ipo"] else theirs.DPOLoss(o.beta, o.label_smoothing)
    return loss(*sums(b))[0]


def slime(theirs, b, o):
    """Average the per-token losses of the project slime, which itself only sums losses over packed samples."""
    bounds = (o.epsilon_low, o.epsilon_high)
    if o.loss_type == "cispo":
        loss = theirs.compute_cispo_loss(b.old - b.logps, b.logps, b.advantages, *bounds)[0]
    else:
        loss = theirs.compute_policy_loss(b.old - b.logps, b.advantages, *bounds)[0]
    if o.beta:
        ratio = (b.logps - b.old).exp() if o.use_bias_correction_kl else None
        loss = loss + o.beta * theirs.compute_approx_kl(b.logps, b.ref, "low_var_kl", ratio)
    loss = loss * b.mask
    return (loss.sum(1) / b.mask.sum(1).clamp(min=1)).mean() if o.loss_type == "grpo" else loss.sum() / o.tokens


def areal(theirs, b, o):
    mask = b.mask.bool()
    if o.loss_type == "sapo":
        return theirs.sapo_loss_fn(b.logps, b.old, b.advantages, 1.0, 1.05, mask)[0]
    return theirs.ppo_actor_loss_fn(
        b.logps, b.old, b.old, b.advantages, o.epsilon_low, mask, o.epsilon_high, None,
        importance_sampling_level=o.importance_sampling_level,
    )[0]  # fmt: skip


def areal_dpo(theirs, b, o):
    """Call AReaL's preference losses, which get all rows in one packed sequence."""
    rows = b.mask.flatten(0, 1)
    logps, ref = (F.pad(x.flatten(0, 1), (0, 1)).flatten() for x in (b.logps, b.ref))
    starts = torch.arange(len(rows) + 1) * (rows.shape[1] + 1)
    mask = F.pad(rows, (1, 0)).flatten().bool()
    policy, reference, lengths = theirs.dpo_pair_logratios(logps, ref, starts, mask, torch.ones(len(b.mask)).bool())
    margins = policy - reference
    margins = margins / lengths if o.loss_type == ["ipo"] else margins
    return theirs.dpo_preference_loss(margins[:, 0] - margins[:, 1], beta=o.beta, loss_type=o.loss_type[0]).mean()


def skyrl(theirs, b, o):
    averages = {"dapo": "token_mean", "cispo": "token_mean", "dr_grpo": "seq_mean_token_sum_norm"}
    average = averages.get(o.loss_type, "sequence_mean")
    bounds = {"eps_clip_low": o.epsilon_low, "eps_clip_high": o.epsilon_high}
    cispo = Settings(cispo_eps_clip_low=o.epsilon_low, cispo_eps_clip_high=o.epsilon_high)
    config = Settings(**bounds, policy_loss_type="regular", loss_reduction=average, off_policy_correction=None)
    config.cispo, config.sapo = cispo, Settings(tau_pos=1.0, tau_neg=1.05)
    advantages = theirs.apply_loss_reduction_to_advantages_minibatch(
        b.advantages, b.mask, average, len(b.mask), o.max_completion_length
    )
    names = {"cispo": "compute_policy_loss_cispo", "sapo": "sapo_policy_loss"}
    name = "gspo_policy_loss" if is_sequence(o) else names.get(o.loss_type, "ppo_policy_loss")
    loss = getattr(theirs, name)(b.logps, b.old, advantages, config, b.mask)[0]
    if o.beta:
        kl = theirs.compute_approx_kl(b.logps, b.ref, b.mask)
        loss = loss + o.beta * theirs.masked_mean(kl, b.mask, dim=-1).mean()
    return loss


def unsloth(theirs, b, o):
    return theirs.grpo_compute_loss(
        b.ref, b.logps, b.old, None, b.mask, b.mask, o.beta, b.advantages[:, 0], num_items_in_batch=o.tokens,
        loss_type=o.loss_type, epsilon_low=o.epsilon_low, epsilon_high=o.epsilon_high, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, max_completion_length=o.max_completion_length,
        importance_sampling_level=o.importance_sampling_level, use_bias_correction_kl=o.use_bias_correction_kl,
    )[0]  # fmt: skip


def open_instruct(theirs, b, o):
    bounds = {"clip_lower": o.epsilon_low, "clip_higher": o.epsilon_high}
    config = Settings(loss_fn=theirs.GRPOLossType[o.loss_type], kl_estimator=2, **bounds)
    ratio, ref = (b.logps - b.old).exp(), b.ref if o.beta else None
    loss, _, kl = theirs.compute_grpo_loss(b.logps, ratio, b.advantages, ref, config, torch.ones_like(ratio))
    return ((loss + o.beta * kl) * b.mask).sum() / o.tokens


def open_instruct_dpo(theirs, b, o):
    return theirs.dpo_loss(*sums(b), o.beta, label_smoothing=o.label_smoothing)[0].mean()


def nemo_rl(theirs, b, o):
    config = theirs.ClippedPGLossConfig(
        token_level_loss=o.loss_type in ("dapo", "cispo"), sequence_level_importance_ratios=is_sequence(o),
        ratio_clip_min=o.epsilon_low, ratio_clip_max=o.epsilon_high, reference_policy_kl_penalty=o.beta,
        use_cispo=o.loss_type == "cispo", use_on_policy_kl_approximation=o.use_bias_correction_kl,
    )  # fmt: skip
    names = {"advantages": b.advantages, "prev_logprobs": b.old, "generation_logprobs": b.old}
    names |= {"reference_policy_logprobs": b.ref, "token_mask": b.mask}
    data = {name: F.pad(x, (1, 0)) for name, x in names.items()} | {"sample_mask": torch.ones(len(b.mask))}
    return theirs.ClippedPGLossFn(config)(b.logps, data, torch.tensor(len(b.mask)), torch.tensor(o.tokens))[0]


def nemo_rl_dpo(theirs, b, o):
    logps, ref, mask = (x.flatten(0, 1) for x in (b.logps, b.ref, b.mask))
    data = {"reference_policy_logprobs": F.pad(ref, (0, 1)), "token_mask": F.pad(mask, (1, 0))}
    data["sample_mask"] = torch.ones(len(mask))
    loss = theirs.DPOLossFn(theirs.DPOLossConfig(reference_policy_kl_penalty=o.beta))
    return loss(logps, data, torch.tensor(len(mask)), None)[0]


def vlm_r1(theirs, b, o):
    """Call VLM-R1's compute_loss with num_iterations=2, so that the old log-probabilities are used."""
    prompt = torch.zeros(len(b.mask), 1)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": b.mask, "completion_mask": b.mask}
    inputs |= {"multimodal_inputs": {}, "advantages": b.advantages[:, 0], "old_per_token_logps": b.old}
    inputs["ref_per_token_logps"] = b.ref
    trainer = Settings(
        state=Settings(global_step=1), num_iterations=2, _buffered_inputs=[inputs], _step=0, beta=o.beta,
        args=Settings(gradient_accumulation_steps=1), epsilon_low=o.epsilon_low, epsilon_high=o.epsilon_high,
        _get_per_token_logps=lambda *_: b.logps, _metrics=defaultdict(list), accelerator=ONE_PROCESS,
    )  # fmt: skip
    return theirs.compute_loss(trainer, None, None)


def ms_swift(theirs, b, o):
    """Call ms-swift's loss in evaluation mode, because its training mode multiplies by the accumulation steps."""
    off = ("compute_entropy", "overlong_filter", "kl_in_reward", "log_rollout_offpolicy_metrics", "_has_teacher")
    unset = ("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta", "chord_sft_iterator")
    trainer = Settings(
        **dict.fromkeys(off, False), **dict.fromkeys(unset), model=Settings(training=False), args=Settings(delta=None),
        beta=o.beta, epsilon_low=o.epsilon_low, epsilon_high=o.epsilon_high, loss_type=o.loss_type, tau_pos=1.0,
        tau_neg=1.05, importance_sampling_level=o.importance_sampling_level, sdar_loss_coef=0, accelerator=ONE_PROCESS,
        max_completion_length=o.max_completion_length, disable_rollout_importance_sampling=True,
        _get_per_token_logps_and_entropies=lambda *_, **__: (b.logps, None),
        _undo_gradient_accumulation_scaling=lambda loss: loss,
    )  # fmt: skip
    batch = Settings(
        completion_mask=b.mask, truncated_mask=None, ref_per_token_logps=b.ref, advantages=b.advantages,
        old_per_token_logps=b.old, rollout_per_token_logps=None, num_items_in_batch=o.tokens,
    )  # fmt: skip
    return theirs._compute_loss_and_metrics(trainer, None, {}, batch)[0]


def prime_rl_sft(theirs, b, o):
    rows = zip(b.logps, b.mask.bool(), strict=True)
    losses = [
        theirs.ce_loss_fn(Settings(trainer_logprobs=x, loss_mask=mask, loss_weights=None)).loss for x, mask in rows
    ]
    return sum(losses) / b.mask.sum()


ONE_PROCESS = Settings(gather_for_metrics=lambda x: x, num_processes=1)

PROJECTS = {
    "verl": Project(
        "verl on PyPI", "0.9.1",
        "verl/trainer/ppo/core_algos.py: agg_loss compute_policy_loss_vanilla compute_policy_loss_gspo "
        "compute_policy_loss_cispo compute_policy_loss_sapo kl_penalty kl_penalty_forward; "
        "verl/utils/torch_functional.py: masked_sum masked_mean",
        {verl: "GRPO; GRPO, k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
        "verl_F", {"ActorConfig": Settings, "AlgoConfig": enum.Enum},
    ),
    "EasyR1": Project(
        "github.com/hiyouga/EasyR1", "b44b311b of 2026-07-30",
        "verl/trainer/core_algos.py: average_loss compute_policy_loss compute_kl; "
        "verl/utils/torch_functional.py: masked_mean",
        {easyr1: "GRPO; GRPO, k3; DAPO; GSPO; CISPO; SAPO"}, "VF",
    ),
    "OpenRLHF": Project(
        "openrlhf on PyPI", "0.11.2",
        "openrlhf/models/loss.py: aggregate_loss PolicyLoss SFTLoss DPOLoss; "
        "openrlhf/models/utils.py: compute_approx_kl masked_mean",
        {openrlhf: "GRPO; GRPO, k3; DAPO; GSPO", openrlhf_dpo: "DPO; IPO", openrlhf_sft: "SFT"},
    ),
    "rlhf-book": Project(
        "github.com/natolambert/rlhf-book", "a66b0bf1 of 2026-08-21",
        "code/policy_gradients/loss.py: approx_kl1 approx_kl2 approx_kl3 get_approx_kl masked_mean GRPOLoss DAPOLoss "
        "GSPOLoss CISPOLoss SAPOLoss; code/direct_alignment/loss.py: DPOLoss IPOLoss",
        {rlhf_book: "GRPO; GRPO, k3; DAPO; GSPO; CISPO; SAPO", rlhf_book_dpo: "DPO; IPO"},
    ),
    "slime": Project(
        "github.com/THUDM/slime", "624b824a of 2026-08-21",
        "slime/utils/ppo_utils.py: compute_approx_kl compute_policy_loss compute_cispo_loss",
        {slime: "GRPO; GRPO, k3; GRPO, weighted k3; DAPO; CISPO"},
    ),
    "AReaL": Project(
        "areal on PyPI", "1.0.4",
        "areal/utils/functional/functional.py: _compute_sequence_level_ratio_and_advantages ppo_actor_loss_fn "
        "sapo_loss_fn dpo_pair_logratios dpo_preference_loss",
        {areal: "DAPO; GSPO; SAPO", areal_dpo: "DPO; IPO"},
    ),
    "SkyRL": Project(
        "skyrl on PyPI", "0.3.0",
        "skyrl_train/utils/ppo_utils.py: compute_approx_kl ppo_policy_loss sapo_policy_loss gspo_policy_loss "
        "compute_policy_loss_cispo reduce_loss apply_loss_reduction_to_advantages_minibatch; "
        "skyrl_train/utils/torch_utils.py: masked_mean safe_exp_delta; "
        "skyrl_train/utils/off_policy_correction_utils.py: apply_off_policy_correction",
        {skyrl: "GRPO; GRPO, k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
    ),
    "unsloth": Project(
        "unsloth_zoo on PyPI", "2026.10.9", "unsloth_zoo/rl_replacements.py: grpo_compute_loss",
        {unsloth: "GRPO; GRPO, k3; GRPO, weighted k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
    ),
    "ms-swift": Project(
        "ms-swift on PyPI", "4.6.0",
        "swift/rlhf_trainers/grpo_trainer.py: GRPOTrainer._compute_loss_and_metrics",
        {ms_swift: "GRPO; GRPO, k3; DAPO; Dr. GRPO; GSPO; CISPO; SAPO"},
        others={"WINDOW_NORMALIZED_LOSS_TYPES": ["cispo", "dapo", "fipo"], "gather_object": list}
        | {"nanmin": torch.min, "nanmax": torch.max},
    ),
    "open-instruct": Project(
        "github.com/allenai/open-instruct", "e6c3044a of 2026-08-20",
        "open_instruct/grpo_utils.py: GRPOLossType compute_grpo_loss; open_instruct/model_utils.py: estimate_kl; "
        "open_instruct/dpo_utils.py: dpo_loss",
        {open_instruct: "DAPO; CISPO", open_instruct_dpo: "DPO"}, "model_utils",
    ),
    "NeMo-RL": Project(
        "github.com/NVIDIA-NeMo/RL", "7ea279ab of 2026-08-22",
        "nemo_rl/algorithms/utils.py: calculate_kl masked_mean; "
        "nemo_rl/algorithms/loss/interfaces.py: LossType LossInputType MetricNormalizer; "
        "nemo_rl/algorithms/loss/loss_functions.py: ClippedPGLossConfig ClippedPGLossFn NLLLossFn PreferenceLossFn "
        "DPOLossConfig DPOLossFn",
        {nemo_rl: "GRPO; GRPO, k3; GRPO, weighted k3; DAPO; GSPO; CISPO", nemo_rl_dpo: "DPO"},
        others={"BaseModel": Settings, "LossFunction": Settings},
    ),
    "VLM-R1": Project(
        "github.com/om-ai-lab/VLM-R1", "90052f47 of 2026-07-07",
        "open_r1/trainer/grpo_trainer.py: VLMGRPOTrainer.compute_loss", {vlm_r1: "GRPO; GRPO, k3"},
    ),
    "prime-rl": Project(
        "github.com/PrimeIntellect-ai/prime-rl", "559b4477 of 2026-08-21",
        "prime_rl/trainer/rl/loss.py: _safe_mean ce_loss_fn", {prime_rl_sft: "SFT"},
        others={"LossOutputs": Settings},
    ),
}  # fmt: skip
