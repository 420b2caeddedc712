"""Read loss functions from a public project, and compare them with TRL's.

They are read from source files, so neither the project nor its dependencies must be installed.
"""

import __future__

import ast
import enum
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from torch.nn import functional as F

from minivlmrl.extras.parity.all_laws import LawReport, examine
from minivlmrl.extras.parity.loss import Verdict, judge

GRPO = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "whole_step": True}
K3 = {"beta": 0.1, "use_bias_correction_kl": False}
# losses in docs/losses_of_the_field.md: options that select test cases recorded from TRL
LOSSES = {
    "GRPO": GRPO,
    "GRPO, k3": GRPO | K3,
    "GRPO, weighted k3": GRPO | {"beta": 0.1, "use_bias_correction_kl": True},
    "BNPO": GRPO | {"loss_type": "bnpo"},
    "BNPO, weighted k3": GRPO | {"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": True},
    "DAPO": GRPO | {"loss_type": "dapo"},
    "DAPO, k3": GRPO | K3 | {"loss_type": "dapo"},
    "Dr. GRPO": GRPO | {"loss_type": "dr_grpo"},
    "GSPO": GRPO | {"importance_sampling_level": "sequence"},
    "CISPO": GRPO | {"loss_type": "cispo"},
    "SAPO": GRPO | {"loss_type": "sapo"},
    "LUSPO": GRPO | {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "LUSPO, weighted k3": GRPO
    | {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
    "VESPO": GRPO | {"loss_type": "vespo"},
    "DPO": {"kind": "dpo", "loss_type": ["sigmoid"]},
    "IPO": {"kind": "dpo", "loss_type": ["ipo"]},
    "hinge": {"kind": "dpo", "loss_type": ["hinge"]},
    "robust": {"kind": "dpo", "loss_type": ["robust"]},
    "SFT": {"kind": "sft", "loss_type": "nll"},
}
# modules, by the names that the functions use
MODULES = {"torch": {}, "jax": {"jax": "jax", "jnp": "jax.numpy"}, "mlx": {"mx": "mlx.core"}}
# decorators to keep, because they change results; others would need imports
KEPT = ("torch.no_grad()", "torch.inference_mode()", "staticmethod")


class Settings(SimpleNamespace):
    """Stub with arbitrary attributes, in place of a project's config, trainer or base class."""

    def __init_subclass__(cls, **_):
        pass

    def get(self, name: str, default=None):
        return getattr(self, name, default)


@dataclass
class Project:
    """A public project: files with loss functions, and adapters that call them.

    An adapter gets the project's functions, a batch and options, and returns a loss. `check` in loss.py describes the
    options. The batch has advantages (B, T), and logps, old, ref and mask, (B, T), or (B, 2, T) for preferences.
    """

    source: str  # package on PyPI or repository
    tried: str  # version, or commit and date, in the page's table
    # "FILE: NAMES; FILE: NAMES"; a name is a function, class or method (Class.method). NAME[first:last] is part of a
    # function, from the statement that assigns `first` to the one that assigns `last`; it becomes a function of its
    # variables that returns all of them.
    files: str
    adapters: dict[Callable, str]  # {adapter: losses that it computes, separated by "; "}
    modules: str = ""  # names by which the functions call their own modules
    others: dict = field(default_factory=dict)  # other global names that the functions need
    framework: str = "torch"

    def functions(self) -> list[tuple[str, list[str]]]:
        """List source files with the names of their loss functions."""
        parts = [text.partition(": ") for text in self.files.split("; ")]
        return [(file, names.split()) for file, _, names in parts]


def read_functions(project: Project, folder: Path) -> SimpleNamespace:
    """Compile a project's functions from its files, without annotations and most decorators."""
    theirs = SimpleNamespace(torch=torch, nn=torch.nn, F=F, math=math, np=numpy, enum=enum, **project.others)
    vars(theirs).update({name: importlib.import_module(path) for name, path in MODULES[project.framework].items()})
    vars(theirs).update(dict.fromkeys(project.modules.split(), theirs))
    for file, names in project.functions():
        found = sorted(folder.rglob(file), key=lambda path: len(path.parts))
        if not found:
            raise ValueError(f"{folder} has no file {file}; give the folder of a clone or of an unpacked wheel")
        nodes = definitions(ast.parse(found[0].read_text()).body)
        for parent, node in list(nodes.items()):
            nodes |= {f"{parent}.{name}": method for name, method in definitions(node.body).items()}
        for text in names:
            name, _, part = text.removesuffix("]").partition("[")
            where = f"{found[0]} has no {text}; the table was made with {project.source} {project.tried}"
            if name not in nodes:
                raise ValueError(where)
            if part:
                statements = part_of(nodes[name], *part.split(":"))
                if not statements:
                    raise ValueError(where)
                setattr(theirs, name.rpartition(".")[2], as_function(compiled(statements, found[0]), theirs))
            else:
                decorators = nodes[name].decorator_list
                nodes[name].decorator_list = [node for node in decorators if ast.unparse(node) in KEPT]
                exec(compiled([nodes[name]], found[0]), vars(theirs))
    return theirs


def compiled(statements: list[ast.stmt], file: Path):
    """Compile statements without evaluating annotations, which would need imports."""
    return compile(ast.Module(statements, []), str(file), "exec", __future__.annotations.compiler_flag)


def definitions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def part_of(function: ast.AST, first: str, last: str) -> list[ast.stmt]:
    """Return the statements from the first that assigns `first` to the next that assigns `last`.

    Both are in the same block, the innermost possible.
    """
    parts = []
    for node in ast.walk(function):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            begin = next((i for i, x in enumerate(block) if first in assigned(x)), len(block))
            end = next((i for i, x in enumerate(block) if i >= begin and last in assigned(x)), None)
            if end is not None:
                parts.append(block[begin : end + 1])
    return parts[-1] if parts else []  # ast.walk visits the innermost block last


def assigned(statement: ast.stmt) -> set[str]:
    """Return the names of variables that a statement assigns, also in its branches."""
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def as_function(code, theirs: SimpleNamespace) -> Callable:
    """Return a function that runs part of a function with given variables, and returns all variables."""

    def run(**variables) -> SimpleNamespace:
        variables = {**vars(theirs), **variables}
        exec(code, variables)
        return SimpleNamespace(**variables)

    return run


def judge_project(project: Project, folder: str | Path) -> dict[str, Verdict]:
    """Compare a public project's losses with values and gradients recorded from TRL.

    Args:
        project: files and adapters.
        folder: clone or unpacked wheel.
    """
    bridge = {"tolerance": 1e-5, "framework": project.framework}
    losses = losses_of(project, folder)
    return {name: judge(loss, **bridge, **LOSSES[name]) for name, loss in losses.items()}


def examine_project(project: Project, folder: str | Path) -> dict[str, LawReport]:
    """Check which laws a public project's losses obey."""
    reports = {}
    for name, loss in losses_of(project, folder).items():
        reports[name] = examine(loss, tolerance=1e-5, framework=project.framework, **LOSSES[name])
    return reports


def losses_of(project: Project, folder: str | Path) -> dict[str, Callable]:
    """Return {name: loss} for a public project; a loss is a function of a batch and options."""
    theirs = read_functions(project, Path(folder))
    adapters = {name: adapter for adapter, names in project.adapters.items() for name in names.split("; ")}
    return {name: as_loss(adapter, theirs) for name, adapter in adapters.items()}


def as_loss(adapter: Callable, theirs: SimpleNamespace) -> Callable:
    """Wrap a public project's loss as a function of a batch and options, which `parity` can check."""

    return lambda batch, options: adapter(theirs, Inputs(batch), Inputs(options))


SHORT = {"logps": "per_token_logps", "old": "old_per_token_logps", "ref": "ref_per_token_logps"}


class Inputs:
    """Loss arguments as attributes; only those that an adapter uses count as read (see calling.Arguments)."""

    def __init__(self, arguments: dict):
        self.arguments = arguments

    def __getattr__(self, name: str):
        x = self.arguments[SHORT.get(name, name)]
        return x[:, None] + 0 * self.mask if name == "advantages" else x


def section(
    name: str, project: Project, reports: dict[str, LawReport], verdicts: dict[str, Verdict] | None = None
) -> str:
    """Return the Markdown section about a project: its files, and a table of results per loss.

    Args:
        name: project name in docs/losses_of_the_field.md.
        project: files and adapters.
        reports: what the laws say, per loss.
        verdicts: differences from TRL, per loss. Without them, the table has all notes on the laws.
    """
    adapters = ", ".join(f"`{adapter.__name__}`" for adapter in project.adapters)
    files = "; ".join(f"`{'`, `'.join(names)}` from {file}" for file, names in project.functions())
    head = f"{project.source}, {project.tried}; adapter {adapters}. The functions are {files}.\n"
    columns = ["loss", "laws that hold", "finding"]
    if verdicts:
        columns = ["loss", "cases that agree", "finding", "laws that hold", "broken laws"]
    rows = [columns]
    for loss, report in reports.items():
        tried = len(report.findings)
        kinds = ["broken"] if verdicts else ["broken", "note", "not tested"]
        laws = [
            f"{tried - len(report.broken_laws())} of {tried}",
            "; ".join(f"{kind}: {says}" for kind in kinds for says in report.sentences(kind)),
        ]
        rows.append([loss, *(agreement(verdicts[loss]) if verdicts else ()), *laws])
    head_row, *others = [f"| {' | '.join(row)} |" for row in rows]
    table = [head_row, "|---" * len(columns) + "|", *others]
    return "\n".join([f"### {name}\n", head, *table])


def agreement(verdict: Verdict) -> tuple[str, str]:
    """Return how many cases agree with TRL, and the designs and mistakes that explain the others."""
    findings = [line for line in verdict.names if line.startswith(("mistake", "design"))]
    findings = findings or ["no name" if verdict.differences else "agrees"]
    return f"{verdict.cases - len(verdict.differences)} of {verdict.cases}", "; ".join(findings)


def is_sequence(o: SimpleNamespace) -> bool:
    return o.importance_sampling_level == "sequence"


def sums(b: SimpleNamespace) -> list[torch.Tensor]:
    """Return four tensors (B,): chosen and rejected policy log-probabilities, then those of the reference."""
    return [x[:, i] for x in ((b.logps * b.mask).sum(-1), (b.ref * b.mask).sum(-1)) for i in (0, 1)]
