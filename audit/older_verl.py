"""Reproduce two bugs in verl's advantages with tool calls: compare releases before and after each fix with minivlmrl.

    python audit/older_verl.py FOLDER  # downloads verl's wheels into FOLDER

A row contains tokens that the policy generated (mask 1) and, between its turns, tool responses
(mask 0). minivlmrl's GAE does not support tool responses, so it receives only the tokens with mask
1.
"""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

from minivlmrl_audit.minivlmrl_api import gae

# bug, pull request of the fix, last release with the bug, first release without it, function,
# gamma, lambda, 1.0 if the function uses values or 0.0 if not
CASES = [
    ("GAE over answers", 2337, "0.4.1", "0.5.0", "compute_gae_advantage_return", 0.9, 0.8, 1.0),
    (
        "returns end at an answer",
        7300,
        "0.8.0",
        "0.9.0",
        "compute_reinforce_plus_plus_outcome_advantage",
        0.9,
        1.0,
        0.0,
    ),
]
FILE = "verl/trainer/ppo/core_algos.py"


def function_of(folder: Path, release: str, name: str):
    """Load one function from a release's wheel, with whitening replaced by the identity."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"verl=={release}"]
    subprocess.run(command, check=True)
    [wheel] = folder.glob(f"verl-{release}-*.whl")
    tree = ast.parse(zipfile.ZipFile(wheel).read(FILE))
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    function.decorator_list = []
    for argument in function.args.args:
        argument.annotation = None
    scope = {"torch": torch, "verl_F": SimpleNamespace(masked_whiten=lambda x, mask: x)}
    exec(compile(ast.Module([function], []), wheel, "exec"), scope)
    return scope[name]


def rows(seed: int = 0, count: int = 6, width: int = 12):
    """Generate random rewards, values and a mask, (count, width) each.

    A row has one nonzero reward, at its last token with mask 1.
    """
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(count, width, generator=g) < 0.6).double()
    mask[:, 0] = 1
    last = (mask * torch.arange(width)).argmax(1, keepdim=True)
    rewards = torch.zeros(count, width).double().scatter(1, last, torch.rand(count, 1, generator=g).double())
    return rewards, torch.rand(count, width, generator=g).double(), mask


def ours(rewards, values, mask, gamma: float, lam: float):
    """Compute returns (count, width) with minivlmrl's GAE; tokens with mask 0 have return 0."""
    returns = torch.zeros_like(rewards)
    for row, of_policy in enumerate(mask.bool()):
        pair = [x[row, of_policy][None] for x in (rewards, values)]
        returns[row, of_policy] = gae(*pair, gamma, lam)[1][0]
    return returns


def main(folder: Path):
    """Print the largest difference between the returns of each verl release and of minivlmrl."""
    for name, fix, before, good, function, gamma, lam, has_values in CASES:
        rewards, values, mask = rows()
        right = ours(rewards, has_values * values, mask, gamma, lam)
        for release in (before, good):
            compute = function_of(folder, release, function)
            if has_values:
                returns = compute(rewards, values, mask, gamma, lam)[1]
            else:
                returns = compute(rewards, mask, config=SimpleNamespace(gamma=gamma))[1]
            gap = ((returns - right) * mask).abs()
            wrong = f"{int((gap > 1e-9).sum())} of {int(mask.sum())} tokens"
            print(f"{name}, verl PR {fix}, {release}: {gap.max().item():.1e}, {wrong}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
