"""One signal asks for a state, a later one ends the process, handlers are given back; whole runs: test_resume.py."""

import os
import pty
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minivlmrl.run import signals
from minivlmrl.run.signals import PREEMPTED, Preempted, StopSignals
from minivlmrl.scale.ranks import World

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


def test_a_signal_that_was_ignored_stays_so():
    """As nohup starts a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals(ONE) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.asked()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_a_lost_terminal_does_not_fail_what_is_printed():
    main, terminal = pty.openpty()
    child = os.fork()
    if child == 0:
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        with StopSignals(ONE) as stop:
            os.close(main)
            os.close(terminal)
            os.kill(os.getpid(), signal.SIGHUP)
            os.write(1, b"a line")  # OSError: Input/output error
            os._exit(0 if stop.asked() else 1)
    os.close(terminal)
    os.close(main)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_long_work_ends_at_once_if_nothing_is_lost():
    world = World(0, 1, torch.device("cpu"))
    with StopSignals(world) as stop:
        world.leave()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.saved = False
        world.leave()
        stop.saved = True
        world.leave()
        raise AssertionError
    assert stop.exit_code == PREEMPTED


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
        assert [signal.getsignal(number) for number in StopSignals.SIGNALS] == [stop.note] * 4
        raise ValueError("no")
    assert [signal.getsignal(number) for number in StopSignals.SIGNALS] == before and stop.exit_code == 0


def test_a_run_in_a_thread_hears_no_signals():
    """As in a notebook's worker; Python lets the main thread alone set handlers."""
    before = [signal.getsignal(number) for number in StopSignals.SIGNALS]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(StopSignals(ONE).__enter__).result()
    assert [signal.getsignal(number) for number in StopSignals.SIGNALS] == before
