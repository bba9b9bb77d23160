"""Who asks for the machine gets it once the others have ended, and before any that come later."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.harness.alone import Room


def test_who_asks_to_be_alone_comes_after_those_within_and_before_those_that_follow(
    tmp_path: Path,
) -> None:
    order: list[str] = []
    asked, within = threading.Event(), threading.Event()

    def alone() -> None:
        room = Room(tmp_path)
        with room.shared():
            asked.set()
            with room.alone():
                order.append("alone")
                within.set()
                follower.start()
                assert not entered.wait(0.2)
                order.append("no longer alone")
            assert entered.wait(10)

    def follow() -> None:
        with Room(tmp_path).shared():
            order.append("follower")
            entered.set()

    entered = threading.Event()
    loner, follower = threading.Thread(target=alone), threading.Thread(target=follow)
    with Room(tmp_path).shared():
        loner.start()
        assert asked.wait(10)
        assert not within.wait(0.2)
        order.append("first")
    loner.join(10)
    follower.join(10)
    assert order == ["first", "alone", "no longer alone", "follower"]


def test_two_that_ask_are_alone_one_after_the_other(tmp_path: Path) -> None:
    ready, counts = threading.Barrier(2), []
    inside = 0

    def alone() -> None:
        nonlocal inside
        room = Room(tmp_path)
        with room.shared():
            ready.wait(10)
            with room.alone():
                inside += 1
                counts.append(inside)
                inside -= 1

    threads = [threading.Thread(target=alone) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert counts == [1, 1]


def test_without_workers_nobody_waits() -> None:
    room = Room(None)
    with room.shared(), room.alone(), Room(None).alone():
        pass
