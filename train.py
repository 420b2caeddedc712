"""From a clone: torchrun train.py [RECIPE] [--section.name=value ...], as `python -m minivlmrl train` elsewhere.

With --expect the run ends with a comparison with recipes/expected.json, see benchmarks/expect.py.
"""

import sys

from minivlmrl.__main__ import main

if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__)
    elif "--expect" in sys.argv:
        from benchmarks.expect import main as train_and_compare

        train_and_compare(sys.argv[1:])
    sys.exit(main(["train", *sys.argv[1:]]))
