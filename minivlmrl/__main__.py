"""`python -m minivlmrl TOOL`: one table of everything that can be started."""

import importlib
import importlib.util
import io
import os
import sys

from minivlmrl.config.parsing import did_you_mean, shortened

TOOLS = {  # name: (module:function, what it does)
    "train": ("minivlmrl.commands.train:main", "train by a recipe, as torchrun train.py does"),
    "ask": ("minivlmrl.commands.chat:main", "ask a model one question"),
    "merge": ("minivlmrl.commands.merge:main", "add an adapter to its base, as one plain folder"),
    "page": ("minivlmrl.commands.report:main", "write one HTML file of a run, or of two"),
    "evaluate": ("minivlmrl.commands.evaluate:main", "answer the rows of a file, and score them"),
    "generate": ("minivlmrl.commands.evaluate:generate_main", "answer the rows of a file"),
    "check": ("minivlmrl.diagnostics.check:main", "say what of a recipe will go wrong"),
    "plan": ("minivlmrl.commands.memory:main", "print what a run needs of each GPU's memory"),
    "replay": ("minivlmrl.diagnostics.replay:main", "train a step of a run again, and show it"),
    "verify": ("minivlmrl_audit.verify:main", "train a run again, and compare every file"),
    "audit": ("minivlmrl_audit.audit:main", "check a step of any trainer, and name its bugs"),
}


def main(arguments: list[str] | None = None) -> int:
    """Start the tool that the first argument names, with the others; returns its exit status.

    Args:
        arguments: those of the command line by default.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe of Windows takes 256 characters
        sys.stdout.reconfigure(errors="replace")
    name = arguments[0] if arguments else "--help"
    try:
        if name not in TOOLS:
            return print_usage(name)
        module, _, function = TOOLS[name][0].partition(":")
        if name in ("verify", "audit") and not importlib.util.find_spec("minivlmrl_audit"):
            raise ValueError(
                "it is a distribution of its own, minivlmrl-audit: pip install ./audit, in a clone"
            )
        return getattr(importlib.import_module(module), function)(arguments[1:]) or 0
    except BrokenPipeError:  # the reader of the output, such as `head`, is gone
        # without this, Python's last flush would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, FloatingPointError, OSError) as error:  # what the user has to change
        line = shortened(" ".join(str(error).split()))
        print(f"python -m minivlmrl {name}: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130  # as in shells


def print_usage(name: str) -> int:
    """List the tools; returns 2 if `name` was meant to be one."""
    lines = [f"  {tool:<10}{sentence}" for tool, (_, sentence) in TOOLS.items()]
    print("usage: python -m minivlmrl TOOL [--help] ...", "", *lines, sep="\n", flush=True)
    if name in ("-h", "--help"):
        return 0
    print(f"\n{name!r} is not one of these tools{did_you_mean(name, TOOLS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
