import os
import signal

import numpy as np
import pytest
from numba import njit

from scheduler_service.cli.failures import plain_interruptions
from scheduler_service.cli.processes import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_where_it_arrives_until_it_is_deferred(number):
    with Interruption(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_deferred_signal_is_kept_until_the_next_pause_and_a_second_changes_nothing(number):
    with Interruption() as interruption:
        interruption.defer()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            interruption.pause(0.0)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@njit
def spin(rounds):
    found = np.zeros(4)
    for i in range(rounds):
        found[i & 3] = found[i & 3] * 0.5 + i
    return found, found


def test_ctrl_c_in_a_compiled_loop_is_ctrl_c():
    spin(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt), plain_interruptions():
            spin(200_000_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_another_system_error_stays_one():
    with pytest.raises(SystemError, match="own"), plain_interruptions():
        raise SystemError("its own")
