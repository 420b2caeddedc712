"""Test that the first signal requests a state, and that the second signal ends the process."""

import os
import pty
import signal
import time

import pytest
import torch

from minivlmrl.distributed.process_group import World
from minivlmrl.run import signals
from tests.helpers.children import exit_code, fork
from tests.helpers.stages import ONE

pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.mark.parametrize("number", signals.StopSignals.SIGNALS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_is_recorded_and_printed_once_by_the_first_rank(number, rank, capfd):
    with signals.StopSignals(World(rank, 1, torch.device("cpu"))) as stop:
        assert stop.first is None
        for _ in "12":  # a scheduler and torchrun may both deliver the same signal
            os.kill(os.getpid(), number)
        assert stop.first is not None
    message = "the run stops as soon as possible, and saves a state if a step is done; send the "
    message += "signal again to exit now"
    assert capfd.readouterr().err == (f"\n{signal.Signals(number).name}: {message}\n" if rank == 0 else "")


def test_an_ignored_signal_stays_ignored():
    """nohup ignores SIGHUP, and a run must not change that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.StopSignals(ONE) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.first is None
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_printing_to_a_lost_terminal_does_not_fail():
    main, terminal = pty.openpty()

    def lose_it():
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        with signals.StopSignals(ONE) as stop:
            os.close(main)
            os.close(terminal)
            os.kill(os.getpid(), signal.SIGHUP)
            os.write(1, b"a line")  # the write raises OSError: Input/output error
            assert stop.first is not None

    child = fork(lose_it)
    os.close(terminal)
    os.close(main)
    assert exit_code(child) == 0


def test_long_work_stops_at_once_if_a_state_can_be_saved():
    world = World()
    with signals.StopSignals(world) as stop:
        stop.world.stop_if_preempted()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.can_save = False
        stop.world.stop_if_preempted()
        stop.can_save = True
        stop.world.stop_if_preempted()
        raise AssertionError
    assert stop.exit_code == signals.PREEMPTED
    world.stop_if_preempted()  # after the `with` block, a later run in this process is not stopped


def test_a_later_signal_ends_the_process(monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST", 0.05)

    def signal_twice():
        with signals.StopSignals(ONE):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(fork(signal_twice)) == -signal.SIGTERM


def test_other_errors_propagate_and_handlers_are_restored():
    before = [signal.getsignal(number) for number in signals.StopSignals.SIGNALS]
    with pytest.raises(ValueError, match="no"), signals.StopSignals(ONE) as stop:
        assert [signal.getsignal(number) for number in signals.StopSignals.SIGNALS] == [stop.on_signal] * 4
        raise ValueError("no")
    assert [signal.getsignal(number) for number in signals.StopSignals.SIGNALS] == before and stop.exit_code == 0
