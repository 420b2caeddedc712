"""Check losses in another project's code: `minivlmrl parity FOLDER` or `minivlmrl parity FOLDER:NAME`.

A function is checked if its arguments are named like log-probs and advantages, or like summed log-probs of chosen and
rejected answers. Project files are not imported, see compile_alone.py.
"""

import ast
import contextlib
import inspect
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minivlmrl.errors import UserError, pluralize, truncate
from minivlmrl.extras.parity.compile_alone import Clone, Names
from minivlmrl.extras.parity.examined import MASKS, Examined, random_batch
from minivlmrl.extras.parity.frameworks import FRAMEWORKS, as_torch
from minivlmrl.extras.parity.loss import SETTINGS, CloseLoss, cases, closest_losses, compare, judge

TOLERANCE = 1e-5  # allows float32 rounding errors
TRIED = 2  # number of TRL losses to compare with, closest first
# argument formats: (advantages as (B, T), (B,) or (B, 1), whether the mask is boolean)
# the last three formats are tried only if the first two fail
LAYOUTS = (("tokens", False), ("rows", False), ("tokens", True), ("rows", True), ("column", False))

LOGPS = r"log_?p(?!ol)|log_?prob"
EPSILON = r"(eps|epsilon|clip|clip_?eps(ilon)?|clip_?range(_ratio)?|clip_?ratio|clip_?param|epsilon_clip|eps_clip)"
# (regex for names in the project's code, tensor they mean or None); the first match counts
TENSORS = (
    (r"estimat|norm|type|entrop|topk|teacher|student|reward|value|return|level", None),
    (rf"(?=.*ref)(?=.*chosen)({LOGPS}|ref)", "ref_chosen"),
    (rf"(?=.*ref)(?=.*reject)({LOGPS}|ref)", "ref_rejected"),
    (rf"(?=.*chosen).*({LOGPS})", "chosen"),
    (rf"(?=.*reject).*({LOGPS})", "rejected"),
    (r"advantage|(^|_)advs?($|_)", "advantages"),
    (rf"(?=.*ref).*({LOGPS})", "ref"),
    (rf"(?=.*(old|rollout|behav|prox|sampl|prev|gen|infer)).*({LOGPS})", "old"),
    (r"^(log_?ratios?|neg_approx_kl)$", "log_ratio"),
    (LOGPS, "logps"),
    (r"^(importance_)?ratios?$", "ratio"),
    (r"^ppo_kl$", "minus_log_ratio"),
    (r"mask", "mask"),
)
NUMBERS = (
    (r"dual|delta|_c$|mode|type", None),
    (r"(eps|clip).*(high|hi|upper|max)|(high|upper).*(eps|clip)", "epsilon_high"),
    (rf"(eps|clip).*(low|lo|lower|min)$|low.*(eps|clip)|^{EPSILON}$", "epsilon_low"),
    (r"^(beta|(init_)?kl_?(coef|coeff|beta|weight|loss_coef))$", "beta"),
    (r"^label_smoothing$", "label_smoothing"),
    (r"num_items|num_tokens|total_tokens", "tokens"),
    (r"max_.*len|loss_scale_factor", "max_completion_length"),
)
CONFIGS = r"config|cfg|args|^policy_loss$"
# values for other options of a project, such as verl's clip_ratio_c
OTHERS = {"temperature": 1.0, "clip_ratio_c": 3.0, "clip_ratio_dual": 3.0}
OTHERS |= dict.fromkeys(("tau_pos", "tau_positive"), 1.0) | dict.fromkeys(("tau_neg", "tau_negative"), 1.05)
OTHERS |= {"loss_agg_mode": "token-mean", "kl_estimator": "k3", "importance_sampling_level": "token"}


def meaning(name: str, table: tuple) -> str | None:
    return next((found for pattern, found in table if re.search(pattern, name.lower())), None)


class Answers:
    """Stand-in for a config, batch or trainer: attributes and keys return test values by name, None if unknown."""

    def __init__(self, case: "Case"):
        vars(self)["_case"] = case

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._case.by_name(name)

    def __getitem__(self, name: str):
        return self._case.by_name(name)

    def __contains__(self, name: str) -> bool:
        return self._case.by_name(name) is not None

    def get(self, name: str, default=None):
        x = self._case.by_name(name)
        return default if x is None else x


@dataclass
class Case:
    """Test case with one shape of advantages and one mask type, such as (B, 1) and bool."""

    batch: dict
    options: dict
    advantages: str
    has_bool_mask: bool

    def by_name(self, name: str, logps: str = "old"):
        """Return the test value for an argument name, None if unknown.

        logps: whose log-probs an argument called "log_probs" gets: "logps" (current policy) or "old" (old policy).
        """
        tensor = meaning(name, TENSORS)
        if tensor:
            return self.tensor(logps if tensor == "logps" else tensor)
        if re.search(CONFIGS, name):
            return Answers(self)
        if name == "global_batch_info":  # verl's dict of loss divisors for the whole step
            return {"batch_num_tokens": self.options.get("tokens"), "global_batch_size": len(self.batch["mask"])}
        number = meaning(name, NUMBERS)
        return self.options.get(number) if number else OTHERS.get(name)

    def tensor(self, name: str):
        mask, logps = self.batch["mask"], self.batch["per_token_logps"]
        if name == "mask":
            return mask > 0 if self.has_bool_mask else mask
        if name == "advantages":
            rows = self.batch["advantages"]
            return {"rows": rows, "column": rows[:, None], "tokens": rows[:, None] + 0 * mask}[self.advantages]
        if name in ("logps", "ref", "old"):
            return logps if name == "logps" else self.batch[f"{name}_per_token_logps"]
        if name.endswith("ratio"):
            log_ratio = logps - self.batch["old_per_token_logps"]
            return {"log_ratio": log_ratio, "minus_log_ratio": -log_ratio, "ratio": math.e**log_ratio}[name]
        of_model = self.batch["ref_per_token_logps"] if name.startswith("ref") else logps
        return (of_model * mask).sum(-1)[:, 0 if name.endswith("chosen") else 1]


@dataclass
class Candidate:
    """Function or method that may be a loss; `owner`: class name, "" for a function."""

    names: Names
    node: ast.FunctionDef
    owner: str
    kind: str  # loss kind, grpo or dpo

    def __str__(self) -> str:
        return f"{self.names.path}:{self.node.lineno} {self.owner}{'.' * bool(self.owner)}{self.node.name}"

    @property
    def framework(self) -> str:
        text = ast.unparse(self.names.tree)
        found = (name for name in FRAMEWORKS if re.search(rf"^ *(import|from) {name}\b", text, re.MULTILINE))
        return next(found, "torch")

    def function(self, case: Case) -> Callable:
        if not self.owner:
            return self.names[self.node.name]
        cls = type(self.owner, (self.names[self.owner], Answers), {})
        instance = object.__new__(cls)
        Answers.__init__(instance, case)
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if parameter.default is not parameter.empty and case.by_name(name) is None:
                instance.__dict__[name] = parameter.default
        return getattr(instance, self.node.name)

    def loss(self, layout: tuple[str, bool]) -> Callable:
        """Wrap this function as a loss (batch, options); `layout`: argument format, from LAYOUTS."""
        choices = {x.arg: first_choice(x) for x in ast.walk(self.node.args) if isinstance(x, ast.arg)}

        def loss(batch: dict, options: dict):
            case = Case(batch, options, *layout)
            function = self.function(case)
            given = {}
            logps = "logps"
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    continue
                x = case.by_name(name, logps)
                if meaning(name, TENSORS) == "logps":
                    logps = "old"  # the second log-prob argument is for the old policy
                if x is None and parameter.default is parameter.empty:
                    x = Answers(case) if choices.get(name) is None else choices[name]
                if x is not None:
                    given[name] = x
            return scalar(function(**given), batch["mask"], options)

        return loss


def first_choice(argument: ast.arg) -> str | int | None:
    """Choose a value for an unknown argument: 0 for a number, "token" for Literal["token", "seq"]."""
    annotation = ast.unparse(argument.annotation) if argument.annotation else ""
    if annotation in ("float", "int", "bool"):
        return 0
    found = re.match(r"""(?:typing\.)?Literal\[['"](\w+)""", annotation)
    return found and found[1]


def scalar(result, mask, options: dict):
    """Return the scalar loss in a function's result; token losses are averaged over all tokens."""
    while isinstance(result, tuple | list):
        result = result[0]
    if isinstance(result, dict):
        result = result.get("loss", next(iter(result.values())))
    if result.ndim == 2:
        return (result * mask).sum() / options["tokens"]
    return result.mean() if result.ndim else result


def candidates(clone: Clone) -> Iterator[Candidate]:
    for names in clone.files:
        for node in names.tree.body:
            methods = node.body if isinstance(node, ast.ClassDef) else [node]
            owner = node.name if isinstance(node, ast.ClassDef) else ""
            for function in methods:
                if isinstance(function, ast.FunctionDef) and (kind := kind_of(function)):
                    yield Candidate(names, function, owner, kind)


def kind_of(node: ast.FunctionDef) -> str | None:
    """Guess the loss kind from argument names: grpo, dpo, or None for other functions."""
    arguments = {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
    attributes = set()
    for x in ast.walk(node):
        of = getattr(x, "value", None)
        if isinstance(of, ast.Name) and of.id in arguments:
            attributes |= {getattr(x, "attr", ""), getattr(getattr(x, "slice", None), "value", "")}
    given = {meaning(name, TENSORS) for name in arguments}
    inside = given | {meaning(name, TENSORS) for name in attributes if isinstance(name, str)}
    returns = any(isinstance(x, ast.Return) and x.value for x in ast.walk(node))
    if not returns or "ctx" in arguments:
        return None
    if "advantages" in inside and given & {"logps", "ratio", "log_ratio", "minus_log_ratio"}:
        return "grpo"
    return "dpo" if given >= {"chosen", "rejected", "ref_chosen", "ref_rejected"} else None


@dataclass
class Audited:
    candidate: Candidate
    # "agrees": equals a TRL loss; "mistake": known bug; "design": deliberate variant; "broken law": lacks a property of
    # correct losses; "differs": unknown cause; "not bound": call failed
    result: str
    says: str

    def __str__(self) -> str:
        return f"{self.candidate}: {self.result}: {self.says}"


def audit_clone(folder: Path, name: str = "") -> Iterator[Audited]:
    """Compare the functions in a folder whose names contain `name` with TRL losses."""
    for candidate in candidates(Clone(folder)):
        if name in candidate.node.name:
            with contextlib.redirect_stdout(open(os.devnull, "w")):
                try:
                    found = audit_candidate(candidate)
                except Exception as error:  # any error in the project's code
                    reason = f"{type(error).__name__}: {truncate(str(error).partition(chr(10))[0], 90)}"
                    found = Audited(candidate, "not bound", reason)
            yield found


def audit_candidate(candidate: Candidate) -> Audited:
    fitting = {}
    error = None
    for i, layout in enumerate(LAYOUTS):
        if fitting and i > 1:
            break
        try:
            fitting[layout] = close_losses(candidate, layout)
        except Exception as found:
            error = error or found
    if error and not fitting:
        raise error
    layout, best = min(fitting.items(), key=lambda item: item[1][0].share)
    loss = candidate.loss(layout)
    results = []
    for close in best[:TRIED]:
        verdict = judge(loss, TOLERANCE, framework=candidate.framework, **close.only)
        if verdict.agrees:
            return Audited(candidate, "agrees", f"TRL's {close}")
        if verdict.kinds:
            result = "mistake" if "mistake" in verdict.kinds else "design"
            lines = [line.partition(": ")[2] for line in verdict.names if line.startswith(("mistake: ", "design: "))]
            return Audited(candidate, result, f"{'; '.join(lines)} (closest: {close})")
        laws = "; ".join(says.partition(". Smallest")[0] for says in verdict.broken)
        unnamed = f"from TRL's {close} for no known cause, but obeys all laws"
        found = ("broken law", laws) if laws else ("differs", unnamed)
        results.append(Audited(candidate, *found))
    return results[0]


def close_losses(candidate: Candidate, layout: tuple[str, bool]) -> list[CloseLoss]:
    """Sort TRL's losses by similarity to a function, closest first."""
    loss = Examined(as_torch(candidate.loss(layout), candidate.framework), candidate.kind, {})
    slope = loss.gradient(random_batch(candidate.kind, MASKS[5]))
    if not (slope.isfinite().all() and slope.any()):
        raise UserError("no gradient reaches the log-probabilities")
    has_kl = "ref_per_token_logps" in loss.read
    only = {} if has_kl else {"beta": 0.0}
    results = [compare(loss.my_loss, TOLERANCE, *case) for case in cases(kind=candidate.kind, **only)]
    settings = [name for name in SETTINGS[: 3 if has_kl else 2] if name in results[0].options]
    close = closest_losses(results, settings, TOLERANCE)
    for trl_loss in close:
        trl_loss.only |= only
    return sorted(close, key=lambda x: (x.share > 0, not is_named(candidate, x.only), x.share))


def is_named(candidate: Candidate, options: dict) -> bool:
    """Return whether the function or class name contains the name of a TRL loss, such as cispo."""
    level = options.get("importance_sampling_level")
    name = "gspo" if level == "sequence" else options["loss_type"]
    return name.replace("_", "") in f"{candidate.owner} {candidate.node.name}".lower().replace("_", "")


def summary(folder: Path, found: list[Audited]) -> str:
    """Count results in one line for CI: "src: 3 functions: 2 agrees, 1 mistake"."""
    counts = sorted(Counter(x.result for x in found).items())
    parts = [f"{count} {result}" for result, count in counts]
    return f"{folder}: {pluralize(len(found), 'function')}: {', '.join(parts)}"
