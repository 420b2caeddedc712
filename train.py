"""Train in a clone: torchrun train.py [RECIPE] [--section.name=value ...]; same as `python -m minivlmrl train`."""

import sys

from minivlmrl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
