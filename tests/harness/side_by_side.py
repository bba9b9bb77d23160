"""What several tests look at, done by threads some at once: while one waits, another computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

Key = TypeVar("Key")
Outcome = TypeVar("Outcome")


@contextmanager
def side_by_side(
    work: Callable[[Key], Outcome], keys: Iterable[Key], at_once: int
) -> Iterator[Mapping[Key, Future[Outcome]]]:
    """Begins with ``work`` on each key, in their order; at the end, what has not begun is left out.

    Args:
        work: its exception is raised where its result is asked for.
        keys: without those that come twice.
        at_once: so many at any time.
    """
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {key: pool.submit(work, key) for key in dict.fromkeys(keys)}
    finally:
        pool.shutdown(cancel_futures=True)


def selected(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters in the tests of this file that are to run."""
    rows = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
    ]
    return [tuple(row[name] for name in names) for row in rows if row.keys() >= set(names)]
