"""Check your loss function for known mistakes (mistakes.py), in Python or in a shell.

| you have | call | in a shell |
|---|---|---|
| your own loss | `laws(my_loss)` | `minivlmrl parity --laws my_loss.py:my_loss` |
| a loss that TRL also has | `check(my_loss)` | `minivlmrl parity my_loss.py:my_loss` |
| gradients of micro-batches or ranks | `assert_split_invariant(gradients, rows)` | |
| a forward pass with packed or padded rows, or images | `depends(logps, ids, document)` | |

See docs/numerical_parity.md.
"""

from minivlmrl.extras.parity.dependence import assert_split_invariant, depends
from minivlmrl.extras.parity.laws import examine, laws
from minivlmrl.extras.parity.loss import cases, check, judge

__all__ = ["assert_split_invariant", "cases", "check", "depends", "examine", "judge", "laws"]
