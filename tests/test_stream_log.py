"""The numbers and events of a stream's work."""

import random

import pytest

from nanovllm.kvcache.stream_log import StreamLog


def test_find_gives_the_event_until_it_is_known_to_be_done() -> None:
    log = StreamLog()
    assert log.find(0) is None
    numbers = [log.add(event) for event in "abc"]
    assert [log.find(number) for number in numbers] == ["a", "b", "c"]
    log.forget_done(lambda event: event in "ab")
    assert [log.find(number) for number in numbers] == [None, None, "c"]
    assert log.find(log.add("d")) == "d"
    log.forget_done(lambda event: True)
    assert [log.find(number) for number in range(5)] == [None] * 5
    assert len(log) == 0


@pytest.mark.parametrize("num_events", [0, 1, 2, 100, 1000])
def test_forget_done_asks_for_few_events(num_events: int) -> None:
    log = StreamLog()
    for event in range(num_events):
        log.add(event)
    asked: list[int] = []
    log.forget_done(lambda event: bool(asked.append(event)) or event < num_events // 3)
    assert len(asked) <= 10
    assert len(log) == num_events - num_events // 3


def test_random_use_finds_exactly_what_is_not_known_to_be_done() -> None:
    rng = random.Random(0)
    log, num_added, num_done, num_known = StreamLog(), 0, 0, 0
    for _ in range(5000):
        match rng.randrange(3):
            case 0:
                num_added += 1
                assert log.add(num_added) == num_added  # an event is its number
            case 1:
                num_done = rng.randint(num_done, num_added)
            case 2:
                log.forget_done(lambda event, num_done=num_done: event <= num_done)
                num_known = num_done
        number = rng.randint(0, num_added)
        assert log.find(number) == (number if number > num_known else None)
        assert len(log) == num_added - num_known
