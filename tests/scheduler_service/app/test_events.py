from __future__ import annotations

import asyncio

from scheduler_service.app.events import LISTENER_BACKLOG, EventLog


def log(clock, keep=5):  # type: ignore[no-untyped-def]
    saved = []
    return EventLog(clock, keep, saved.append), saved


async def take(listening, count):  # type: ignore[no-untyped-def]
    async with asyncio.timeout(10):
        return [(await anext(listening)).message for _ in range(count)]


def test_ids_rise_also_within_one_millisecond_and_after_a_restart(clock):
    events, _ = log(clock)
    ids = [events.add("kind", "message").id for _ in range(3)]
    clock.now += 10
    later, _ = log(clock)
    assert [*ids, later.add("kind", "message").id] == sorted({*ids, later.recent(1)[0].id})


def test_the_ring_is_bounded_and_pages_backwards(clock):
    events, saved = log(clock)
    for number in range(8):
        events.add("kind", str(number))
    newest = events.recent(2)
    assert [event.message for event in newest] == ["7", "6"]
    assert [event.message for event in events.recent(10, newest[-1].id)] == ["5", "4", "3"]
    assert len(saved) == 8


async def test_a_listener_gets_what_it_missed_and_what_comes(clock):
    events, _ = log(clock)
    first = events.add("kind", "first")
    events.add("kind", "missed")
    listening = events.listen(after=first.id)
    assert await take(listening, 1) == ["missed"]
    events.add("kind", "new")
    assert await take(listening, 1) == ["new"]
    await listening.aclose()


async def test_a_listener_that_sleeps_loses_the_oldest_and_holds_up_nobody(clock):
    events, _ = log(clock)
    listening = events.listen()
    waiting = asyncio.create_task(anext(listening))
    await asyncio.sleep(0)
    events.add("kind", "seen")
    assert (await waiting).message == "seen"
    for number in range(LISTENER_BACKLOG + 10):
        events.add("kind", str(number))
    assert await take(listening, 1) == ["10"]
    await listening.aclose()


async def test_closing_ends_all_listeners(clock):
    events, _ = log(clock)

    async def listen() -> int:
        return len([event async for event in events.listen()])

    tasks = [asyncio.create_task(listen()) for _ in range(20)]
    await asyncio.sleep(0)
    events.close()
    async with asyncio.timeout(10):
        assert await asyncio.gather(*tasks) == [0] * 20
