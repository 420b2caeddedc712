"""What another version of TRL does not have is named; what it answers is compared in test_parity.py."""

import pytest

from minivlmrl.audit.compare import NotInThisVersion

MISSING = "oracle missing: pip install trl==1.16.0 transformers==5.23.0"


def test_an_option_that_trl_does_not_know_is_named():
    pytest.importorskip("trl", reason=MISSING)
    from minivlmrl.audit import policy_cells, trl_oracle

    batch = policy_cells.policy_batch(0)
    with pytest.raises(NotInThisVersion, match="GRPOConfig has no option no_such_option"):
        trl_oracle.grpo_loss(batch, no_such_option=1)
    with pytest.raises(NotInThisVersion, match="Unknown loss type: no_such_loss"):
        trl_oracle.grpo_loss(batch, loss_type="no_such_loss")
    with pytest.raises(NotInThisVersion, match=r"no trl\.no_such\.GRPOTrainer"):
        trl_oracle.grpo_loss(batch, module="trl.no_such")
