"""Run a command such as train or chat: `minivlmrl COMMAND`."""

import io
import os
import sys

from minivlmrl.commands.process import set_up_process
from minivlmrl.errors import UserError, did_you_mean, print_traceback, user_error_message
from minivlmrl.load_extra import load_extra

COMMANDS = {  # {command: (module:function, help text)}
    "train": ("minivlmrl.commands.train:main", "train a recipe, as train.py does"),
    "chat": ("minivlmrl.extras.answers.chat:main", "send a model one prompt and print its answer"),
    "serve": ("minivlmrl.extras.answers.serve:main", "ask a model, and its base, in a browser"),
    "merge": ("minivlmrl.extras.merge:main", "merge an adapter into its base model"),
    "report": ("minivlmrl.monitor.report:main", "write an HTML report of one run or two runs"),
    "evaluate": ("minivlmrl.extras.answers.evaluate:main", "answer the rows in a file and score the answers"),
    "generate": ("minivlmrl.extras.answers.evaluate:generate_main", "answer the rows in a file"),
    "convert": ("minivlmrl.extras.convert.command:main", "convert other projects' rows to the form that a run reads"),
    "check": ("minivlmrl.monitor.check.command:main", "find problems in a recipe before training"),
    "memory": ("minivlmrl.monitor.memory.command:main", "estimate the GPU memory that a run needs"),
    "parity": ("minivlmrl.extras.parity.command:main", "find mistakes in a loss"),
}
# {command of another project: our command}, for a hint after an unknown command
OTHERS = {"eval": "evaluate", "export": "merge", "infer": "generate", "predict": "generate", "test": "evaluate"}
OTHERS |= dict.fromkeys(("sft", "dpo", "grpo", "ppo", "rlhf", "reward", "kto", "rm", "pt"), "train")


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # replace characters that a Windows pipe cannot encode
        sys.stdout.reconfigure(errors="replace")
    set_up_process()
    name = arguments[0] if arguments else "--help"
    try:
        if name in ("--version", "-V", "version"):
            from minivlmrl.commands.version import version_text

            print(version_text())
            return 0
        if name not in COMMANDS:
            lines = [f"  {command:<11}{sentence}" for command, (_, sentence) in COMMANDS.items()]
            print("usage: minivlmrl COMMAND [--help] ...", "", *lines, sep="\n", flush=True)
            if name in ("-h", "--help"):
                return 0
            meant = f"; did you mean {OTHERS[name]}?" if name in OTHERS else did_you_mean(name, COMMANDS)
            if name.endswith((".yaml", ".yml")) or name.startswith("--"):
                meant = f"; write minivlmrl train {name}"
            raise UserError(f"this is not one of the commands{meant}")
        return load_extra(COMMANDS[name][0], f"the command {name}")(arguments[1:]) or 0
    except BrokenPipeError:  # stdout was closed, for example by `head`
        # avoid a second BrokenPipeError when Python flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        line = user_error_message(error)
        if line is None:
            print_traceback(error)
            return 1
        print(f"minivlmrl {name}: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130  # 128 + SIGINT


if __name__ == "__main__":
    sys.exit(main())
