"""Launch order: buckets are launched one after the other, each when its gradients have arrived."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_adaptive.buckets import Bucket

_NO_BUCKET = -1


class LaunchOrder:
    """The buckets of one layout, and how many of their gradients are still awaited."""

    def __init__(self) -> None:
        self.buckets: tuple[Bucket, ...] | None = None
        """None until ranks have agreed on their layers."""
        self._bucket_of: dict[int, int] = {}
        self._awaited: list[int] = []
        self._next = 0
        self._early = 0

    def set(self, buckets: tuple[Bucket, ...], holds_last: bool = False) -> None:
        """Send these buckets from now on.

        Args:
            buckets: in launch order.
            holds_last: whether the last waits for the end of the backward pass in any case.
        """
        self.buckets = buckets
        self._early = len(buckets) - holds_last
        self._bucket_of = {layer.index: each.index for each in buckets for layer in each.layers}
        self.rearm()

    def rearm(self) -> None:
        """Await all gradients again."""
        self._next = 0
        self._awaited = [len(bucket.layers) for bucket in self.buckets or ()]

    def clear(self) -> None:
        """Forget the buckets: ranks must agree again."""
        self.buckets = None

    @property
    def untouched(self) -> bool:
        """Whether no bucket has been launched in this step."""
        return self._next == 0

    def arrived(self, index: int) -> bool:
        """Count a gradient; whether it may have completed the next bucket to be launched."""
        position = self._bucket_of.get(index, _NO_BUCKET)
        if position == _NO_BUCKET:
            return False
        self._awaited[position] -= 1
        return position == self._next

    def complete(self) -> Iterator[Bucket]:
        """The buckets to launch whose gradients have all arrived, up to the first that waits."""
        assert self.buckets is not None
        while self._next < self._early and self._awaited[self._next] == 0:
            self._next += 1
            yield self.buckets[self._next - 1]

    def remaining(self) -> Iterator[Bucket]:
        """All buckets that have not been launched in this step."""
        assert self.buckets is not None
        rest, self._next = self.buckets[self._next :], 0
        yield from rest
