"""Every bug of the museum changes what training computes: two steps of a tiny run end with other numbers."""

import json
import sys

import pytest
import tiny

sys.path.insert(0, str(tiny.ROOT / "benchmarks"))
