"""`minivlmrl parity TARGET`: check a loss, a recorded step or the losses in a code folder, and name mistakes.

The exit status is 0 if all numbers agree and a loss has all tested properties (laws), 2 if nothing could be compared,
else 1. In a code folder, differences of unknown cause do not change the exit status.
"""

import argparse
import json
import traceback
from importlib import import_module
from pathlib import Path

import yaml

from minivlmrl.config.import_utils import load_name
from minivlmrl.errors import UserError, optional_dependency, user_error_message
from minivlmrl.extras.parity.all_laws import examine
from minivlmrl.extras.parity.audit import SECONDS, as_json, checked, report
from minivlmrl.extras.parity.clone import audit_clone, summary
from minivlmrl.extras.parity.frameworks import FRAMEWORKS, INSTALL
from minivlmrl.extras.parity.loss import judge


def parse(arguments: list[str] | None) -> argparse.Namespace:
    says = "Check losses against TRL's recorded numbers, or recompute a recorded step of any trainer."
    p = argparse.ArgumentParser("minivlmrl parity", description=says)
    p.add_argument(
        "target",
        help="FILE.py:FUNCTION: (batch, options) -> loss, or a loss for a recipe; the folder of a recorded step; or a "
        "folder of code, or FOLDER:NAME for its functions whose names contain NAME",
    )
    p.add_argument(
        "--only", nargs="*", default=[], metavar="NAME=VALUE", help="options of a loss's test cases, such as kind=dpo"
    )
    p.add_argument(
        "--laws", action="store_true", help="check a loss by laws that hold for any loss, without TRL's numbers"
    )
    p.add_argument("--framework", choices=FRAMEWORKS, help="framework of a loss function (default: torch)")
    p.add_argument("--tolerance", type=float, help="largest error of a loss (default: 1e-6; float32 needs 1e-5)")
    p.add_argument("--json", action="store_true", help="print the report about a step as one JSON object")
    p.add_argument("--seconds", type=float, help=f"limit of the search in a step, in CPU seconds (default {SECONDS:g})")
    options = p.parse_args(arguments)
    if options.target.endswith(".py"):
        p.error(f"{options.target} is a file; also name its function: {options.target}:FUNCTION")
    is_clone = is_code(options.target.partition(":")[0])
    if (options.json or options.seconds is not None) and (is_clone or ":" in options.target):
        p.error("--json and --seconds are options for a recorded step; the search in a loss has no limit")
    for name in ("laws", "framework", "tolerance", "only"):
        if getattr(options, name) and (is_clone or ":" not in options.target):
            p.error(f"--{name} is an option for a loss function, FILE.py:FUNCTION")
    return options


def is_code(folder: str) -> bool:
    """Return True for a folder that has no recorded step."""
    return Path(folder).is_dir() and not (Path(folder) / "step.json").is_file()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder, _, name = options.target.partition(":")
    if is_code(folder):
        return check_clone(Path(folder), name)
    if ":" in options.target:
        return check_loss(options)
    findings, d = checked(options.target, SECONDS if options.seconds is None else options.seconds)
    result = as_json(findings, d)
    print(json.dumps(result, indent=1) if options.json else report(findings, d))
    return int(not result["agrees"])


def check_loss(options: argparse.Namespace) -> int:
    only = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in options.only)}
    framework = options.framework or "torch"
    only |= {"framework": framework, "tolerance": options.tolerance or 1e-6}
    with optional_dependency(framework, INSTALL.format(framework)):
        import_module(framework)
    try:
        my_loss = load_name(options.target)
        verdict = examine(my_loss, **only) if options.laws else judge(my_loss, **only)
    except Exception as error:
        if user_error_message(error) is None:  # exception raised by my_loss
            traceback.print_exc()
            return 2
        raise
    print(verdict)
    return int(not verdict.agrees)


def check_clone(folder: Path, name: str) -> int:
    found = []
    for audited in audit_clone(folder, name):
        print(audited, flush=True)
        found.append(audited)
    if not found:
        raise UserError(
            f"{folder} is not a recorded step, because it does not contain step.json, and none of its Python files has "
            "a function that takes log-probabilities and advantages. To check a function of (batch, options), add its "
            "file and name, as in my_loss.py:my_loss; see docs/numerical_parity.md"
        )
    print(summary(folder, found))
    results = {audited.result for audited in found}
    return 2 if results == {"not bound"} else int(bool(results & {"mistake", "broken law"}))
