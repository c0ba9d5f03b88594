import os
import signal

import pytest

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
