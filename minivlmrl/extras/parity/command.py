"""`minivlmrl parity FILE.py:FUNCTION`: check a loss, and name its mistakes.

Exit status: 0 if the loss passes, 1 if it differs from TRL or breaks a law, 2 if nothing could be compared.
"""

import argparse
import traceback
from importlib import import_module

import yaml

from minivlmrl.config.import_utils import resolve_function
from minivlmrl.errors import UserError, optional_dependency, user_error_message
from minivlmrl.extras.parity.calling import FRAMEWORKS, INSTALL
from minivlmrl.extras.parity.laws import examine
from minivlmrl.extras.parity.loss import judge


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line. The target must name a function: FILE.py:FUNCTION."""
    p = argparse.ArgumentParser("minivlmrl parity", description="Check a loss, and name its mistakes.")
    p.add_argument("target", help="FILE.py:FUNCTION")
    p.add_argument(
        "--only", nargs="*", default=[], metavar="NAME=VALUE", help="options of test cases, such as kind=dpo"
    )
    p.add_argument("--laws", action="store_true", help="check laws that hold for any loss, without TRL's numbers")
    p.add_argument("--framework", choices=FRAMEWORKS, default="torch", help="framework of the loss (default: torch)")
    p.add_argument("--tolerance", type=float, default=1e-6, help="largest error (default: 1e-6; float32 needs 1e-5)")
    options = p.parse_args(arguments)
    if ":" not in options.target:
        raise UserError(
            f"{options.target} is not FILE.py:FUNCTION. Recorded steps and folders of code are no longer checked; "
            "commit 9091b662 is the last that can: pip install "
            "'minivlmrl @ git+https://github.com/minivlmrl/minivlmrl@9091b662'"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Check a loss, print the verdict, and return the exit status."""
    options = parse(arguments)
    only = {}
    for text in options.only:
        name, _, value = text.partition("=")
        only[name] = yaml.safe_load(value)
    framework = options.framework
    only |= {"framework": framework, "tolerance": options.tolerance}
    with optional_dependency(framework, INSTALL.format(framework)):
        import_module(framework)
    try:
        my_loss = resolve_function("loss", options.target, {})
        verdict = examine(my_loss, **only) if options.laws else judge(my_loss, **only)
    except Exception as error:
        if user_error_message(error) is None:  # exception raised by my_loss
            traceback.print_exc()
            return 2
        raise
    print(verdict)
    return int(not verdict.passes)
