"""Bind the arguments of losses in other trainers by name: verl, OpenRLHF, Liger, Hugging Face, TRL's older DPO."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minivlmrl.config.import_utils import parameters_of
from minivlmrl.errors import UserError

LOGP = re.compile(r"(per_token_|token_)?log_?p(rob)?(abilitie)?s?(?![a-z])")
# {meaning: words in the name of an argument}; the first that fits counts
TENSORS = {
    "config": {"config", "cfg", "args", "options", "hparams"},
    "mask": {"mask", "masks"},
    "advantages": {"advantage", "advantages", "adv", "advs"},
    "log_ratio": {"logratio", "logratios"},
    "ratio": {"ratio", "ratios"},
    "per_token_logps": {"logp"},
    "logits": {"logits"},
    "outputs": {"outputs", "output"},
    "hidden": {"hidden", "input"},
    "weight": {"weight"},
    "labels": {"labels", "targets", "target"},
    "ids": {"ids"},
}
OURS = {"advantages", "mask"}  # second and third argument of grpo_loss
OLD = {"old", "rollout", "behavior", "behaviour", "sampling", "sampled", "sampler", "prev", "inference", "prox"}
# {name of an argument, without "_": option}
NUMBERS = {
    "beta": "beta klcoef klcoeff initklcoef klbeta klweight klloss_coef klcoefficient",
    "epsilon_low": "epsilonlow epsilon eps cliprange clipratio cliprangelow clipratiolow clipepslow clipeps epsclip "
    "clipparam clipepsilon clipepsilonlow epslow epscliplow clipcoef clip",
    "epsilon_high": "epsilonhigh cliprangehigh clipratiohigh clipepshigh epshigh epscliphigh clipepsilonhigh",
    "label_smoothing": "labelsmoothing",
    "tokens": "tokens numtokens totaltokens numitemsinbatch numitems",
    "max_completion_length": "maxcompletionlength maxtokens maxnewtokens maxresponselength lossscalefactor",
    "loss_type": "losstype",
    "importance_sampling_level": "importancesamplinglevel",
}
OPTION_OF = {name: option for option, names in NUMBERS.items() for name in names.replace("_", "").split()}
EPSILONS = {"epsilon_low", "epsilon_high"}
BOUND = 0.5  # a default of at least this is a bound, such as clip_max=1.2, not an epsilon


def bound_forms(my_loss: Callable) -> list[Callable] | None:
    """Return functions (batch, options) that bind arguments by name; None for a loss of ours or f(batch, options).

    Shapes of advantages are not known, so there is one function for (B, T), (B,) and (B, 1).
    """
    parameters = parameters_of(function_of(my_loss))
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return None
    names = [*parameters]
    meanings = {meaning(name) for name in names}
    tensors = {"per_token_logps", "chosen", "rejected", "logits", "outputs", "hidden", "ratio", "log_ratio"}
    if not tensors & meanings or (names[:1] and OURS & {*names[:3]} == OURS):
        return None
    shapes = ("tokens", "rows", "column") if "advantages" in meanings else ("rows",)
    return [partial(call_bound, my_loss, shape) for shape in shapes]


@dataclass
class Method:
    """Method of a trainer, which is built or imitated when the loss is called."""

    cls: type
    name: str

    def __call__(self, batch: dict, options: dict) -> Any:
        """Call a method with the arguments (self, batch, options)."""
        return self.of_trainer(options, options)(batch, options)

    def of_trainer(self, values: dict, options: dict) -> Callable:
        return getattr(trainer(self.cls, values, options), self.name)


def load_method(cls: type, name: str) -> Callable:
    """Return a static method, or a method whose trainer is built when it is called."""
    is_static = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    return getattr(cls, name) if is_static else Method(cls, name)


def function_of(my_loss: Callable) -> Callable:
    """Return the function whose arguments are bound: a method, or a class's forward."""
    if isinstance(my_loss, Method):
        return getattr(my_loss.cls, my_loss.name)
    return getattr(my_loss, "forward", my_loss) if isinstance(my_loss, type) else my_loss


def meaning(name: str) -> str | None:
    """Return what an argument name means: a tensor of the batch, an option, "config" or None."""
    text = LOGP.sub("logp", name.lower()).replace("log_ratio", "logratio")
    words = {*text.split("_")}
    model = "ref_" if any(word.startswith("ref") for word in words) else ""
    for answer in ("chosen", "rejected"):
        if answer in words:
            return f"{answer}_mask" if "mask" in words else model + answer
    if "clip" in words or text.replace("_", "") in OPTION_OF:
        return OPTION_OF.get(text.replace("_", ""))
    what = next((what for what, known in TENSORS.items() if words & known), None)
    if what == "per_token_logps":
        return "old_per_token_logps" if words & OLD else model + what
    return what


class Settings:
    """Config, or trainer that was not initialized: attributes and keys are options by name."""

    def set(self, options: dict):
        vars(self)["_options"] = options

    def __getattr__(self, name: str) -> Any:
        if meaning(name) == "config":
            return self
        if name.startswith("__") or meaning(name) not in self._options:
            raise AttributeError(f"{name} is not an option here; write a function (batch, options) that calls my_loss")
        return self._options[meaning(name)]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def call_bound(my_loss: Callable, shape: str, batch: dict, options: dict) -> Any:
    """Call a loss with arguments bound by name; a class is built with options first."""
    values = values_of(my_loss, batch, options, shape)
    if isinstance(my_loss, Method):
        function = my_loss.of_trainer(values, options)
    elif isinstance(my_loss, type):
        function = my_loss(**arguments(my_loss, values))
        function = getattr(function, "forward", function)
    else:
        function = my_loss
    return function(**arguments(function, values))


def trainer(cls: type, values: dict, options: dict) -> Any:
    """Build a trainer, or imitate one whose arguments cannot be bound; unknown attributes are options."""
    cls = type(cls.__name__, (cls, Settings), {})
    try:
        instance = cls(**arguments(cls, values))
    except UserError:
        instance = object.__new__(cls)
    instance.set(options)
    return instance


def arguments(function: Callable, values: dict) -> dict:
    """Return {argument: value} for the arguments whose names say what they mean."""
    given = {}
    has_policy = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        what = meaning(name)
        if what == "per_token_logps" and has_policy:
            what = "old_per_token_logps"  # a second log-prob without another word
        has_policy = has_policy or what == "per_token_logps"
        has_default = parameter.default is not parameter.empty
        is_bound = has_default and isinstance(parameter.default, float) and parameter.default >= BOUND
        if what in values and not (is_bound and what in EPSILONS):
            given[name] = values[what]
        elif not has_default:
            raise UserError(
                f"the argument {name!r} of my_loss could not be bound, because its name is not known. Write a function "
                "(batch, options) that calls it"
            )
    return given


def values_of(my_loss: Callable, batch: dict, options: dict, shape: str) -> dict:
    """Return {meaning: value} for a batch; DPO has sums of each answer, or (B, T) if the loss takes a mask."""
    logps, mask = batch["per_token_logps"], batch["mask"]
    config = Settings()
    config.set(options)
    values = {**options, **batch, "config": config}
    if "advantages" in batch:
        rows = batch["advantages"]
        values["advantages"] = {"rows": rows, "column": rows[:, None], "tokens": rows[:, None] + 0 * mask}[shape]
        values["log_ratio"] = logps - batch["old_per_token_logps"]
        values["ratio"] = values["log_ratio"].exp()
    if options["kind"] == "dpo":
        by_token = any("mask" in name for name in parameters_of(function_of(my_loss)))
        for side, answer in enumerate(("chosen", "rejected")):
            values[f"{answer}_mask"] = mask[:, side]
            for model, x in (("", logps), ("ref_", batch["ref_per_token_logps"])):
                values[model + answer] = x[:, side] if by_token else (x * mask).sum(-1)[:, side]
    else:
        values |= of_logits(logps, mask)
    return values


def of_logits(logps: Tensor, mask: Tensor) -> dict:
    """Return logits of a vocabulary of two tokens, of which token 0 is the label, as Hugging Face's losses get them.

    Position t predicts label t + 1, as in `outputs.logits` and `labels`; masked labels are -100.
    """
    both = torch.stack([logps, (-logps.expm1()).log()], -1)
    logits = torch.cat([both, both[:, -1:].detach()], 1)
    labels = torch.where(mask > 0, 0, -100)
    labels = torch.cat([torch.full_like(labels[:, :1], -100), labels], 1)
    outputs = SimpleNamespace(logits=logits)
    values = {"outputs": outputs, "ids": torch.zeros_like(mask, dtype=torch.long)}
    return values | {"logits": logits, "labels": labels, "hidden": both, "weight": torch.eye(2, dtype=logps.dtype)}
