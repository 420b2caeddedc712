"""Use `minivlmrl.grpo_loss` or your own loss function in TRL's GRPOTrainer; see docs/library.md.

TRL must be 1.10 or newer: older releases normalize some losses differently.
"""

# pyright cannot see TRL's lazy classes and attributes set at runtime
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
import copy
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import trl
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.losses.grpo import AVERAGES, TERMS, LossNormalizer, check_bounds, check_known, grpo_loss
from minivlmrl.losses.grpo_variants import mean_entropy, off_policy_mask

if tuple(map(int, trl.__version__.split(".")[:2])) < (1, 10):
    raise ImportError(f'TRL {trl.__version__} is installed, but 1.10 is needed; run `pip install "trl>=1.10"`')

LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # signature of grpo_loss
# GRPOConfig fields that only some loss_types use, such as vespo_k_pos
TERM_OPTIONS = (
    "delta",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
CONFIG_DEFAULTS = {field.name: field.default for field in fields(trl.GRPOConfig)}


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer with `minivlmrl.grpo_loss` or your own loss function.

    Only the method `_compute_loss` is overridden.

    Args:
        loss: loss_type for `grpo_loss`, or a function with the same signature; None = loss_type in `args`.
        kl_estimator: estimator for the KL to the reference, see kl_term. Other loss options are in `args`.
    """

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: trl.GRPOConfig | None = None,
        *more_args,
        loss: str | LossFunction | None = None,
        kl_estimator: str = "k3",
        **kwargs,
    ):
        if args is None:  # the same default output folder as in TRL
            name = model if isinstance(model, str) else model.config._name_or_path
            args = trl.GRPOConfig(f"{name.split('/')[-1]}-GRPO")
        args = copy.copy(args)
        if isinstance(loss, str):
            if args.loss_type not in (CONFIG_DEFAULTS["loss_type"], loss):
                raise UserError(f"args.loss_type is {args.loss_type!r}, but loss is {loss!r}; set only one of them")
            args.loss_type = loss
        epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        check_bounds(args.epsilon, epsilon_high, args.beta)
        self.loss_options = {
            "loss_type": args.loss_type,
            "importance_sampling_level": args.importance_sampling_level,
            "epsilon_low": args.epsilon,
            "epsilon_high": epsilon_high,
            "beta": args.beta,
            "use_bias_correction_kl": args.use_bias_correction_kl,
            "kl_estimator": kl_estimator,
        }
        self.loss_function: LossFunction = loss if callable(loss) else grpo_loss
        # pass only changed options: your own loss may not accept the others
        self.term_options = {}
        for name in TERM_OPTIONS:
            value = getattr(args, name)
            if value != CONFIG_DEFAULTS[name]:
                self.term_options[name] = value
        check_options(args, self.loss_function, self.term_options)
        super().__init__(model, reward_funcs, args, *more_args, **kwargs)

    def _compute_loss(self, model, inputs: dict[str, Any]) -> Tensor:
        """Compute the micro-batch loss, and log its metrics."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T)
        logps, entropies, aux_loss = self._score(model, inputs)
        parts = self.current_gradient_accumulation_steps if self.model.training else 1
        # dapo divides by tokens per process; num_items_in_batch counts tokens over all processes
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:
            tokens = tokens * parts / self.args.steps_per_generation
        normalizer = LossNormalizer(len(mask) * parts, tokens, self.max_completion_length)
        kept = mask
        if self.top_entropy_quantile < 1:
            # entropy quantile over all processes, as in TRL
            kept = mask * self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        weights, term_options = self._weights(inputs, logps, mask, kept)
        returned = self.loss_function(
            logps,
            inputs["advantages"],
            mask,
            **self.loss_options,
            old_per_token_logps=inputs.get("old_per_token_logps"),
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
            token_weights=weights,
            normalizer=normalizer,
            **term_options,
        )
        loss, metrics = (returned, {}) if isinstance(returned, Tensor) else returned
        entropy = (entropies * mask).sum() / mask.sum().clamp(min=1)
        metrics = {**metrics, "entropy": entropy}
        if self.entropy_coef:
            # TRL divides all losses but dapo by the number of micro-batches, and logs them undivided
            by_tokens = AVERAGES.get(self.loss_type) is AVERAGES["dapo"]
            metrics["policy_loss"] = loss.detach() if by_tokens else loss.detach() * parts
            if self.model.training:
                metrics["entropy_coef"] = loss.new_tensor(self.entropy_coef)
            loss = loss - self.entropy_coef * mean_entropy(entropies, kept, normalizer)
        if self.aux_loss_enabled:
            metrics["aux_loss"] = aux_loss.detach()
            loss = loss + self.router_aux_loss_coef * aux_loss / parts
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            mean = self.accelerator.gather(value.detach()).float().nanmean()  # mean over all processes
            self._metrics[mode][name].append(mean.item())
        return loss

    def _score(self, model, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute completion log-probs and entropies, both (B, T), and the MoE router's auxiliary loss."""
        score = self._get_per_token_logps_and_entropies
        arguments = inspect.signature(score).parameters.keys() - {"input_ids", "attention_mask"}
        return score(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            # image tensors, such as pixel_values and image_grid_thw
            **{name: inputs[name] for name in arguments & inputs.keys()},
        )

    def _weights(
        self, inputs: dict[str, Any], logps: Tensor, mask: Tensor, kept: Tensor
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the token weights (None if all are 1) and the other keyword arguments for the policy loss."""
        weights = None if kept is mask else kept
        if self.off_policy_mask_threshold is not None:
            old_logps = inputs.get("old_per_token_logps", logps.detach())
            # without vLLM, the old policy has sampled the completions
            sampling_logps = inputs.get("sampling_per_token_logps", old_logps)
            near = off_policy_mask(logps, sampling_logps, inputs["advantages"], mask, self.off_policy_mask_threshold)
            weights = near if weights is None else weights * near
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return weights, self.term_options
        ratio = inputs["importance_sampling_ratio"]
        if self.loss_options["loss_type"] == "vespo":
            return weights, {**self.term_options, "importance_sampling_ratio": ratio}
        return ratio if weights is None else weights * ratio, self.term_options


def check_options(args: trl.GRPOConfig, function: LossFunction, term_options: dict[str, Any]):
    """Raise UserError if TRL's config sets an option that the loss does not support."""
    if args.use_adaptive_entropy:
        raise UserError("use_adaptive_entropy is true, but minivlmrl keeps entropy_coef constant; set it to false")
    if args.use_liger_kernel:
        raise UserError("use_liger_kernel is true, but it replaces the loss in some releases of TRL; set it to false")
    if function is grpo_loss:
        check_known("loss_type", args.loss_type, AVERAGES)
        function = TERMS[args.loss_type]
    accepted = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if takes_any:
        return
    for name in term_options:
        if name not in accepted:
            raise UserError(f"{name} is {term_options[name]}, but the loss {function.__name__} has no such argument")
