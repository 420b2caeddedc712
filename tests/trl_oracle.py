"""Asks TRL's real GRPOTrainer for its loss, gradient and advantages without a model and without a training run.

The trainer is made without __init__; the attributes that its methods read are set from a real GRPOConfig, and its
forward pass is replaced by given log-probabilities.
"""

import tempfile
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

trl = pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")

COPIED = (
    "max_completion_length", "num_generations", "temperature", "loss_type", "beta", "use_vllm", "scale_rewards",
    "vllm_importance_sampling_correction", "importance_sampling_level", "off_policy_mask_threshold", "num_iterations",
    "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "multi_objective_aggregation",
    "mask_truncated_completions", "pad_to_multiple_of", "log_multimodal",
)  # fmt: skip


class OneProcess:
    """What the methods ask of accelerate, for `num_processes` ranks of which we are the first."""

    process_index, is_main_process, sync_gradients, device = 0, True, True, torch.device("cpu")

    def __init__(self, num_processes):
        self.num_processes = num_processes

    def gather(self, x):
        return x

    gather_for_metrics = unwrap_model = gather

    def reduce(self, x, reduction):
        return x

    def pad_across_processes(self, x, **_):
        return x


def trainer(num_processes=1, reward_weights=None, **options):
    args = trl.GRPOConfig(
        output_dir=tempfile.gettempdir(), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        **{"per_device_train_batch_size": 4, "num_generations": 2} | options,
    )  # fmt: skip
    self = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    self.args, self.accelerator = args, OneProcess(num_processes)
    for name in COPIED:
        setattr(self, name, getattr(args, name))
    self.epsilon_low = args.epsilon
    self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    self.num_generations_eval = args.num_generations
    self.model = torch.nn.Linear(1, 1).train()
    self.model.is_gradient_checkpointing = False
    self.ref_model = self.model if args.beta else None
    self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    self.aux_loss_enabled, self._entropy_bonus_enabled = False, False
    self._metrics = {"train": defaultdict(list)}
    self.reward_weights = torch.tensor(reward_weights or [1.0])
    self.reward_funcs = [None] * len(self.reward_weights)
    self.reward_func_names = [str(k) for k in range(len(self.reward_weights))]
    self.environment_factories = self.environments = None
    self.tools, self.chat_template_kwargs, self._is_vlm = [], {}, False
    self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=0, eos_token_id=1), [1]
    self.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    self._logs = {name: deque() for name in ("images", "prompt", "completion", "advantages")}
    self._logs |= {"rewards": defaultdict(deque), "extra": defaultdict(deque)}
    self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
    self._step, self._buffered_inputs = 0, None
    return self


def loss(batch, num_items, **options):
    """TRL's loss, its gradient to the log-probabilities, and its metrics, for one micro-batch."""
    self = trainer(**options)
    logps = batch["per_token_logps"].clone().requires_grad_()
    self._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    mask = batch["completion_mask"].long()
    inputs = {
        "prompt_ids": torch.ones(len(mask), 1).long(), "prompt_mask": torch.ones(len(mask), 1).long(),
        "completion_ids": mask, "completion_mask": mask, "advantages": batch["advantages"],
        "num_items_in_batch": torch.tensor(num_items),
    }  # fmt: skip
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if batch.get(name) is not None:
            inputs[name] = batch[name]
    value = self._compute_loss(self.model, inputs)
    gradient = torch.autograd.grad(value, logps)[0] if value.requires_grad else torch.zeros_like(logps)
    return value.detach(), gradient, {name: values[-1] for name, values in self._metrics["train"].items()}


def advantages(rewards, num_generations, scale_rewards="group", weights=None):
    """TRL's advantages and share of zero-variance groups for rewards (n, K), None as NaN."""
    n = len(rewards)
    self = trainer(
        reward_weights=weights or [1.0] * rewards.shape[1], per_device_train_batch_size=n,
        num_generations=num_generations, scale_rewards=scale_rewards,
    )  # fmt: skip
    self._generate = lambda prompts: ([[7]] * n, [[5, 1]] * n, None, ["x"] * n, None, {}, None, [])
    self._calculate_rewards = lambda *_, **__: rewards
    self._get_per_token_logps_and_entropies = lambda *_, **__: (torch.zeros(n, 2), None, None)
    out = self._generate_and_score_completions([{"prompt": "p"}] * n)
    return out["advantages"], self._metrics["train"]["frac_reward_zero_std"][-1]


class GivenLogps(torch.nn.Module):
    """A language model whose log-probabilities (B, T - 1) are given."""

    def __init__(self, logps):
        super().__init__()
        self.logps, self.is_gradient_checkpointing = logps, False

    def forward(self, labels, **_):
        from trl.trainer.utils import FusedCausalLMOutput

        mask = labels[:, 1:] != -100
        nothing = torch.zeros_like(self.logps)
        return FusedCausalLMOutput(
            log_probs=self.logps * mask, label_mask=mask, entropy=nothing, mean_logits=nothing,
            log_sum_sq_probs=nothing, is_top1=torch.zeros_like(mask),
            loss=-(self.logps * mask).sum() / mask.sum().clamp(min=1),
        )  # fmt: skip


def sft_loss(logps, mask, num_items):
    """TRL's SFTTrainer loss (nll) and its gradient for log-probabilities (B, T) of the tokens that mask selects."""
    args = trl.SFTConfig(output_dir=tempfile.gettempdir(), use_cpu=True, bf16=False, report_to="none")
    logps = logps.clone().requires_grad_()
    self = trl.SFTTrainer.__new__(trl.SFTTrainer)
    self.args, self.accelerator, self.model = args, OneProcess(1), GivenLogps(logps).train()
    self.accelerator.parallelism_config, self.get_tp_size = None, lambda: 1
    self.aux_loss_enabled, self.compute_loss_func, self.label_smoother = False, None, None
    self._tp_size, self._total_train_tokens, self.current_gradient_accumulation_steps = 1, 0, 1
    self._metrics = {"train": defaultdict(list)}
    # labels (B, T + 1): position 0 predicts nothing
    labels = torch.nn.functional.pad(torch.where(mask.bool(), 5, -100), (1, 0), value=-100)
    inputs = {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": torch.ones_like(labels)}
    value = self.compute_loss(self.model, inputs, num_items_in_batch=num_items)
    return value.detach(), torch.autograd.grad(value, logps)[0]
