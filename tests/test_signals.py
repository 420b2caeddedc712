"""One signal asks for a state, a later one ends the process, handlers are given back; whole runs: test_resume.py."""

import os
import signal
import time

import pytest
import torch

from minivlmrl.scale import signals
from minivlmrl.scale.ranks import World
from minivlmrl.scale.signals import PREEMPTED, Preempted, StopSignals

ONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("number", StopSignals.SIGNALS)
def test_a_signal_is_noted_and_said_once(number, capfd):
    with StopSignals(ONE) as stop:
        assert not stop.asked()
        for _ in "12":  # a scheduler and torchrun may both pass it on
            os.kill(os.getpid(), number)
        assert stop.asked()
    name = signal.Signals(number).name
    assert capfd.readouterr().err == f"\n{name}: the state is saved after this rollout; again: end now\n"


def test_only_the_first_rank_speaks(capfd):
    with StopSignals(World(1, 1, torch.device("cpu"))) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked()
    assert capfd.readouterr().err == ""


def test_a_later_signal_ends_the_process(monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.05)
    child = os.fork()
    if child == 0:
        with StopSignals(ONE):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)  # not reached
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_preempted_becomes_the_exit_code_and_its_message(capsys):
    with StopSignals(ONE) as stop:
        raise Preempted("saved states/000004")
    assert stop.exit_code == PREEMPTED == 75
    assert capsys.readouterr().out == "saved states/000004\n"


def test_other_errors_pass_and_handlers_are_given_back():
    before = [signal.getsignal(number) for number in StopSignals.SIGNALS]
    with pytest.raises(ValueError, match="no"), StopSignals(ONE) as stop:
        assert [signal.getsignal(number) for number in StopSignals.SIGNALS] == [stop.note] * 2
        raise ValueError("no")
    assert [signal.getsignal(number) for number in StopSignals.SIGNALS] == before and stop.exit_code == 0
