"""Every bug of the museum changes what training computes: two steps of a tiny run end with other numbers."""

import sys

import tiny

sys.path.insert(0, str(tiny.ROOT / "benchmarks"))
