"""Which lengths to try. Nothing here imports torch: the parent of a run bisects too."""

from collections.abc import Callable, Iterator


def bisect(lengths: list[int], probes: int, runs: Callable[[int], bool]) -> Iterator[int]:
    """Which lengths to try: the middle first, then the middle of the open range. ``runs`` is asked after each.

    Seven lengths are settled by three probes.
    """
    low, high = -1, len(lengths)
    for _ in range(probes):
        if low + 1 >= high:
            return
        middle = (low + high) // 2
        yield lengths[middle]
        if runs(lengths[middle]):
            low = middle
        else:
            high = middle
