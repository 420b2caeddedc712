"""What another version of TRL does not have is named; what it answers is compared in test_families.py."""

import pytest

MISSING = "oracle missing: pip install trl==1.16.0 transformers==5.23.0"


def test_an_option_that_trl_does_not_know_is_named():
    pytest.importorskip("trl", reason=MISSING)
    from parity import policy_cells, trl_oracle

    batch = policy_cells.policy_batch(0)
    with pytest.raises(TypeError, match="no_such_option"):
        trl_oracle.grpo_loss(batch, no_such_option=1)
    with pytest.raises(ValueError, match="Unknown loss type: no_such_loss"):
        trl_oracle.grpo_loss(batch, loss_type="no_such_loss")
    with pytest.raises(ModuleNotFoundError, match=r"trl\.no_such"):
        trl_oracle.grpo_loss(batch, module="trl.no_such")
