"""The reference that moves."""

from torch import nn

from minivlmrl.algorithms.reference import Reference, ReferenceConfig

from policy_by_hand import near


class Layers(nn.Module):
    """What Reference knows of a policy, with one weight, which is 1."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])
        nn.init.ones_(self.model.layers[0].weight)


def test_sync_ref_model():
    """Every second step reference = 0.4 reference + 0.6 policy; with a policy at 2: 1, 1.6, 1.6, 0.64 + 1.2 = 1.84."""
    policy = Layers()
    reference = Reference(policy, ReferenceConfig(sync_ref_model=True, ref_model_sync_steps=2))
    nn.init.constant_(policy.model.layers[0].weight, 2.0)
    seen = []
    for steps in range(1, 5):
        reference.after_step(steps)
        seen.append(reference.model.model.layers[0].weight.item())
    assert seen == near(1.0, 1.6, 1.6, 1.84)
