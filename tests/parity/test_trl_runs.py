"""Compare whole runs of our trainers with TRL's: the same weights, rows and completions."""

import functools

import pytest

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
from tests.parity import trl_runs

STEPS = 6  # with two rollouts, all of the warm-up, and two steps after it


@pytest.fixture(scope="module")
def our_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    trl_runs.make_folder(folder)
    return functools.cache(lambda kind: (folder, trl_runs.our_run(kind, folder, STEPS)))


@pytest.mark.parametrize(("kind", "kept"), [
    pytest.param(kind, kept, marks=[pytest.mark.slow] if kept else [])
    for kind in trl_runs.KINDS for kept in ("", *trl_runs.designs_of(kind))
])  # fmt: skip
def test_a_run_equals_trls_but_for_the_named_designs(kind, kept, our_run):
    folder, ours = our_run(kind)
    weights, losses = trl_runs.their_run(kind, folder, ours, [kept])
    apart = max(trl_runs.differences(ours.weights, weights))
    assert (1e-9 < apart < 0.1) if kept else apart < 1e-12
    if not kept:
        assert losses == pytest.approx([line["loss"] for line in ours.metrics], rel=0, abs=1e-12)


@pytest.mark.parametrize("kind", trl_runs.KINDS)
def test_the_runs_have_what_trainers_could_treat_differently(kind, our_run):
    _, ours = our_run(kind)
    assert trl_runs.differences(ours.weights, ours.weights[:1] * (STEPS + 1))[-1] > 1e-3
    assert any(line["grad_norm"] > trl_runs.OPTIMIZER["max_grad_norm"] for line in ours.metrics)
    if kind == "grpo":
        assert any(line["clip_ratio/region_mean"] > 0 for line in ours.metrics)
        assert len({len(completion.ids) for completion in ours.completions}) > 3
        assert {completion.stopped for completion in ours.completions} == {True, False}
        assert {bool(x) for completion in ours.completions for x in completion.policy_mask} == {True, False}
