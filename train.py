"""The run of minivlmrl/train.py, started from a clone: torchrun train.py [RECIPE] [--section.name=value ...]."""

import sys

from minivlmrl.train import start

if __name__ == "__main__":
    start(sys.argv[1:])
