"""The batches and events of a stream's work."""

import random

import pytest

from nanovllm.offload.streams import StreamLog


def test_find_gives_the_event_until_it_is_known_to_be_done() -> None:
    log = StreamLog(num_layers=2)
    assert log.next_batch == 1
    for event in "abcd":
        log.add(event)
    assert log.next_batch == 3
    assert [log.find(batch, layer) for batch in range(3) for layer in range(2)] == [None, None, "a", "b", "c", "d"]
    log.forget_done(lambda event: event in "abc")  # a batch and a layer of the next one
    assert [log.find(batch, layer) for batch in (1, 2) for layer in range(2)] == [None, None, None, "d"]
    assert log.next_batch == 3
    log.add("e", num_layers=2)
    assert [log.find(3, layer) for layer in range(2)] == ["e", "e"]
    log.forget_done(lambda event: True)
    assert [log.find(batch, layer) for batch in range(4) for layer in range(2)] == [None] * 8
    assert (len(log), log.next_batch) == (0, 4)


def test_next_batch_while_layers_are_missing_is_refused() -> None:
    log = StreamLog(num_layers=3)
    log.add("a", num_layers=2)
    with pytest.raises(AssertionError, match="events of 2 of 3 layers"):
        _ = log.next_batch


@pytest.mark.parametrize("num_events", [0, 1, 2, 100, 1000])
def test_forget_done_asks_for_few_events(num_events: int) -> None:
    log = StreamLog(num_layers=1)
    for event in range(num_events):
        log.add(event)
    asked: list[int] = []
    log.forget_done(lambda event: bool(asked.append(event)) or event < num_events // 3)
    assert len(asked) <= 10
    assert len(log) == num_events - num_events // 3


@pytest.mark.parametrize("num_layers", [1, 3])
def test_random_use_finds_exactly_what_is_not_known_to_be_done(num_layers: int) -> None:
    rng = random.Random(0)
    log, num_added, num_done, num_known = StreamLog(num_layers), 0, 0, 0
    for _ in range(5000):
        match rng.randrange(3):
            case 0:
                num_added += 1
                log.add(num_added)  # an event is its number
            case 1:
                num_done = rng.randint(num_done, num_added)
            case 2:
                log.forget_done(lambda event, num_done=num_done: event <= num_done)
                num_known = num_done
        number = rng.randint(1, max(1, num_added))
        batch, layer = divmod(number - 1, num_layers)
        if number <= num_added:
            assert log.find(batch + 1, layer) == (number if number > num_known else None)
        assert len(log) == num_added - num_known
