"""What makes tests begin again (httplib): that the tester was late, and nothing that the server does."""
import time

import pytest

from conftest import wait_until
from httplib import Late, Pace, unless_late


@pytest.mark.filterwarnings("error")
def test_a_wait_that_fails_is_no_silence():
    rounds = []

    @unless_late
    def test():
        with Pace(1000, 100) as pace:
            rounds.append(pace.due())
            wait_until(lambda: len(rounds) > 4, 0.2, "what the server never does")
    with pytest.raises(AssertionError, match="what the server never does"):
        test()
    assert len(rounds) == 1


def test_pytests_own_end_of_a_test_is_none():
    with pytest.raises(pytest.fail.Exception), Pace(1000, 100) as pace:
        time.sleep(0.1)
        pace.look()
        pytest.fail("Timeout (>300.0s) from pytest-timeout.")


def test_who_was_silent_begins_again_and_it_is_said():
    rounds = []

    @unless_late
    def test():
        rounds.append(None)
        with Pace(1000, 100) as pace:
            time.sleep(0.1)
            assert pace.seen(len(rounds) == 3)
    with pytest.warns(UserWarning, match="test: begun again: Late.*silent for 0") as said:
        test()
    assert len(rounds) == 3 and len(said) == 2


def test_the_fifth_time_it_is_late_it_fails():
    rounds = []

    @unless_late
    def test():
        with Pace(1000, 100) as pace:
            rounds.append(time.sleep(0.1))
            assert pace.seen(False)
    with pytest.warns(UserWarning), pytest.raises(Late):
        test()
    assert len(rounds) == 5


def test_what_fails_behind_the_end_of_a_pace_is_not_late():
    with pytest.raises(AssertionError), Pace(1000, 100) as pace:
        time.sleep(0.1)
        pace.look()
        pace.over()
        raise AssertionError("a pool that is not free")
