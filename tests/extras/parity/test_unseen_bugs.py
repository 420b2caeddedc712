"""Fifteen bugs that were written without looking at the audit's causes: no wrong cause may be printed first.

The audit names thirteen of them, and finds the stage and the wrong numbers for the other two.
"""

import pytest

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
from minivlmrl.extras.parity.audit import audit, report
from tests.extras.parity import trl_fixtures
from tests.extras.parity.bugs import UNSEEN_BUGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_fixtures.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN_BUGS)
def test_no_wrong_cause(name, folder, tmp_path, monkeypatch):
    bug = UNSEEN_BUGS[name]
    step = trl_fixtures.step_with([bug], folder, tmp_path, monkeypatch.setattr)
    findings = audit(step)
    wrong = [finding for finding in findings if not finding.ok]
    printed = report(findings, step)
    assert wrong[0].stage == bug.stage, printed
    first = [str(cause.says) for cause in wrong[0].explained[:1]]
    assert bool(first) == bool(bug.cause), printed
    assert bug.cause in "".join(first), printed
