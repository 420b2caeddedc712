"""Run `minivlmrl train` in a clone of the repository: torchrun train.py [RECIPE] [--section.name=value ...]"""

import sys

from minivlmrl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
