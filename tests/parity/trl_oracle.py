"""Compute losses, gradients and advantages with methods of TRL's trainers, without a model or a training run.

Trainers are created without __init__, with attributes from a real config and a forward pass that returns given
log-probabilities. Import this file inside functions, because it imports TRL.
"""

import contextlib
import copy
import tempfile
from collections import defaultdict, deque
from types import SimpleNamespace

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainingArguments
from trl.rewards import get_soft_overlong_punishment

from tests.parity.compare import FAMILIES

Loss = tuple[Tensor, dict[str, float]]  # a loss and TRL's metrics
PROMPT = 2  # tokens before an answer; their log-probabilities have no effect


class Outputs(dict):
    """A model output with access by attribute and by name."""

    __getattr__ = dict.get


class GivenLogps(torch.nn.Module):
    """A language model over two tokens that gives token 1 the log-probabilities (B, T - 1).

    The log-sum-exp of the logits [log(1 - p), log p] is 0 with gradient 0. Losses that take logits get p with its
    exact gradient, and losses that take log-probabilities get log p directly.
    """

    def __init__(self, logps: Tensor):
        super().__init__()
        self.logps, self.is_gradient_checkpointing = logps, False

    def forward(self, labels=None, **_):
        p = self.logps.detach().exp()
        output = Outputs(logits=pad(torch.stack([torch.log1p(-self.logps.exp()), self.logps], -1), (0, 0, 0, 1)))
        if labels is not None:
            mask = labels[:, 1:] != -100
            output.update(dict.fromkeys(("entropy", "mean_logits"), torch.zeros_like(p)))
            output.update(log_probs=self.logps * mask, label_mask=mask, is_top1=torch.zeros_like(mask))
        return output


def bare(kind: str, num_processes: int = 1, **options):
    """Create a trainer without __init__, with its real config, as the first process among `num_processes`."""
    trainer_class, config_class = (getattr(trl, f"{kind}{part}") for part in ("Trainer", "Config"))
    known, common = (found.__dataclass_fields__.keys() for found in (config_class, TrainingArguments))
    self = trainer_class.__new__(trainer_class)
    self.args = config_class(tempfile.gettempdir(), **FAMILIES["quiet"] | options)
    for name in known - common:
        setattr(self, name, getattr(self.args, name))
    self.accelerator = SimpleNamespace(num_processes=num_processes, device=torch.device("cpu"), process_index=0)
    vars(self.accelerator).update(is_main_process=True, sync_gradients=True, parallelism_config=None)
    for name in ("gather", "gather_for_metrics", "unwrap_model", "reduce", "pad_across_processes"):
        setattr(self.accelerator, name, lambda x, *_, **__: x)
    self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    vars(self).update(copy.deepcopy(FAMILIES["attributes"]))
    self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
    self.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    return self


def _policy_trainer(kind: str, reward_weights=(1.0,), **options):
    """Create a GRPOTrainer or RLOOTrainer with the attributes that grpo_loss and rollout need."""
    self = bare(kind, **{"per_device_train_batch_size": 4, "num_generations": 2} | options)
    args, functions = self.args, range(len(reward_weights))
    self.epsilon_low = args.epsilon
    self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    self.num_generations_eval = args.num_generations
    self.model, self.ref_model = torch.nn.Linear(1, 1).train(), torch.nn.Linear(1, 1) if args.beta else None
    self.model.is_gradient_checkpointing = False
    self._entropy_bonus_enabled = bool(getattr(args, "entropy_coef", 0.0))
    self.reward_weights = torch.tensor(reward_weights)
    self.reward_funcs = self.reward_processing_classes = [None for _ in functions]
    self.reward_func_names = [str(number) for number in functions]
    self._tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    self.processing_class = SimpleNamespace(batch_decode=lambda ids, **_: ["x"] * len(ids), **vars(self._tokenizer))
    self._logs = defaultdict(deque, rewards=defaultdict(deque), extra=defaultdict(deque))
    self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
    return self


def _loss(self, method, *inputs) -> Loss:
    return method(*inputs), {name: values[-1] for name, values in self._metrics["train"].items() if values}


def grpo_loss(batch: dict, items: int = 1, kind: str = "GRPO", **options) -> Loss:
    """Call _compute_loss of GRPOTrainer or RLOOTrainer for a micro-batch; items: tokens of a step on all ranks."""
    self, mask = _policy_trainer(kind, **options), batch["mask"].long()
    forward = batch["per_token_logps"], batch["entropies"], None
    self._get_per_token_logps_and_entropies = lambda *_, **__: forward
    inputs = {name: value for name, value in batch.items() if value is not None}
    inputs |= {"prompt_ids": torch.ones(len(mask), 1).long(), "prompt_mask": torch.ones(len(mask), 1).long()}
    inputs |= {"completion_ids": mask, "completion_mask": mask, "num_items_in_batch": torch.tensor(items)}
    if kind == "RLOO":
        inputs["old_logps"] = (batch["old_per_token_logps"] * mask).sum(1)
    return _loss(self, self._compute_loss, self.model, inputs)


def rollout(rewards, kind="GRPO", logps=(None, None), completions=None, sampling=None, output="advantages", **options):
    """Return `output` of _generate_and_score_completions for rewards (n, K).

    `logps` are (n, T) under policy and reference, `completions` are lists of ids (1 ends a text), and `sampling` are
    lists of the sampler's log-probabilities.
    """
    n = len(rewards)
    self = _policy_trainer(kind, per_device_train_batch_size=n, **options)
    ids, texts = ([[7]] * n, completions or [[5, 1]] * n), ["x"] * n
    of_grpo = *ids, None, texts, sampling, {}, None, None  # without tools and images
    self._generate = lambda *_: of_grpo if kind == "GRPO" else (*ids, texts)
    self._calculate_rewards = lambda *_, **__: rewards
    old, ref = torch.zeros(n, 2) if logps[0] is None else logps[0], logps[1]
    self._get_per_token_logps_and_entropies = lambda model, *_, **__: (old if model is self.model else ref, None, None)
    answer = self._generate_and_score_completions([{"prompt": "p"} for _ in range(n)])
    flat = self._metrics["train"]["frac_reward_zero_std"]
    return {output: answer[output]} | ({"metric frac_reward_zero_std": torch.tensor(flat[-1])} if flat else {})


def _sequences(mask: Tensor) -> dict[str, Tensor]:
    """Return sequences (n, PROMPT + T) with an answer where the mask (n, T) is 1."""
    answer, real = (pad(mask.long(), (PROMPT, 0), value=value) for value in (0, 1))
    return {"input_ids": torch.ones_like(answer), "attention_mask": real, "completion_mask": answer}


def _with_models(kind: str, logps: Tensor, ref_logps: Tensor | None = None, **options):
    """Create a trainer whose models return the log-probabilities (n, T) of answers after a prompt."""
    self = bare(kind, **options)
    policy, ref = (x if x is None else GivenLogps(pad(x, (PROMPT - 1, 0), value=-9.0)) for x in (logps, ref_logps))
    self.model, self.ref_model, self.precompute_ref_logps = policy.train(), ref, False
    return self


def dpo_loss(batch: dict, **options) -> Loss:
    """Call DPOTrainer._compute_loss for pairs (B, 2, T), chosen first."""
    names = "per_token_logps", "ref_per_token_logps", "mask"
    policy, ref, mask = (batch[name].transpose(0, 1).flatten(0, 1) for name in names)  # TRL: first all chosen answers
    self = _with_models("DPO", policy, ref, **options)
    self.loss_types, self.loss_weights = self.loss_type, self.loss_weights or [1.0] * len(self.loss_type)
    inputs = _sequences(mask)
    if options.get("precompute_ref_log_probs"):
        self.accelerator.autocast = contextlib.nullcontext
        inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = self.compute_ref_log_probs(self.ref_model, inputs)
        self.ref_model, self.precompute_ref_logps = None, True
    return _loss(self, self._compute_loss, self.model, inputs, False)


def kto_loss(batch: dict, **options) -> Loss:
    """Call KTOTrainer._compute_loss for answers (B, T); batch["kl_mask"] selects the tokens of the KL."""
    self = _with_models("KTO", batch["per_token_logps"], batch["ref_per_token_logps"], **options)
    self.calculate_KL = self.loss_type != "apo_zero_unpaired"
    inputs = _sequences(batch["mask"]) | {"label": batch["labels"]}
    inputs |= {"KL_" + name: value for name, value in _sequences(batch["kl_mask"]).items()}
    return _loss(self, self._compute_loss, self.model, inputs, False)


def sft_loss(batch: dict, items: int | None, **options) -> Loss:
    """Call SFTTrainer.compute_loss for the tokens (B, T) in the mask; items: tokens of the step on all processes."""
    self, inputs = _with_models("SFT", batch["per_token_logps"], **options), _sequences(batch["mask"])
    self.compute_loss_func, self.get_tp_size, self.label_smoother = None, lambda: 1, None
    self.model_accepts_loss_kwargs = True
    inputs["labels"] = torch.where(inputs.pop("completion_mask").bool(), 1, -100)
    return _loss(self, self.compute_loss, self.model, inputs, False, None if items is None else torch.tensor(items))


def reward_loss(batch: dict, **options) -> Loss:
    """Call RewardTrainer.compute_loss for rewards (B,) of chosen and rejected answers."""
    self, rewards = bare("Reward", **options), torch.cat([batch["chosen"], batch["rejected"]])
    self.model = torch.nn.Linear(1, 1).train()
    inputs = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(len(rewards), 2))
    inputs |= {} if batch["margin"] is None else {"margin": batch["margin"]}
    return _loss(self, self.compute_loss, lambda **_: SimpleNamespace(logits=rewards[:, None]), inputs)


def soft_overlong_punishment(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    return get_soft_overlong_punishment(max_completion_len, soft_punish_cache)([[1] * length])[0]


def what_trl_says(batch: dict, options: dict) -> dict[str, Tensor | dict]:
    """Return TRL's loss for your own tensors, its gradient to `per_token_logps`, and its metrics.

    Args:
        batch: as in the docstring of parity.check; for kto also `labels` (B,), true for a good answer, and
            `kl_mask` (B, T).
        options: kind (grpo, rloo, dpo, kto, sft), the step's `tokens` (by default the batch's tokens), and fields of
            TRL's config; epsilon_low is an alias for its epsilon. A missing field has TRL's default.
    """
    requested = {{"epsilon_low": "epsilon"}.get(name, name): value for name, value in options.items()}
    kind, tokens = requested.pop("kind"), requested.pop("tokens", None)
    requested.pop("whole_step", None)
    batch = batch | {"per_token_logps": batch["per_token_logps"].detach().clone().requires_grad_()}
    if kind in ("grpo", "rloo"):
        batch.setdefault("entropies", torch.zeros_like(batch["mask"]))
        items = batch["mask"].sum().item() if tokens is None else tokens
        loss, logged = grpo_loss(batch, items, kind.upper(), **requested)
    elif kind == "dpo":
        types = requested.pop("loss_type", ["sigmoid"])
        types = [types] if isinstance(types, str) else types
        loss, logged = dpo_loss(batch, loss_type=types, **{"loss_weights": None} | requested)
    elif kind == "kto":
        loss, logged = kto_loss(batch, **requested)
    else:
        loss, logged = sft_loss(batch, tokens, **requested)
    [gradient] = torch.autograd.grad(loss, batch["per_token_logps"])
    return {"loss": loss.detach(), "gradient": gradient, "logged": logged}
