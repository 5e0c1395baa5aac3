from __future__ import annotations

from fxoffload.runtime.profiler.stream_events import host_events


def test_host_events_tell_the_time_in_milliseconds() -> None:
    times = iter([5.0, 7.5])
    events = host_events(lambda: next(times))
    first, second = events.record(), events.record()
    assert first.elapsed_ms(second) == 2.5
    real = host_events()
    assert 0 <= real.record().elapsed_ms(real.record()) < 1000
