"""Noticing that a number which wandered about has jumped."""

from __future__ import annotations

import collections
import statistics

MINIMUM = 8  # values before anything is said


class ChangePoint:
    """How far each new value lies from the recent ones, in robust standard deviations.

    window  recent values that are compared with
    jump    beyond it a value is a change; the window then starts anew, so that one jump is reported once
    """

    def __init__(self, window: int, jump: float) -> None:
        self.jump = jump
        self._values: collections.deque[float] = collections.deque(maxlen=max(window, MINIMUM))

    def add(self, value: float) -> float:
        """The value's distance from the window's median; 0 while there are too few."""
        distance = 0.0
        if len(self._values) >= MINIMUM:
            centre = statistics.median(self._values)
            spread = 1.4826 * statistics.median(abs(old - centre) for old in self._values)
            # A constant series has no spread of its own: then a hundredth of its size is one standard deviation.
            spread = max(spread, 0.01 * abs(centre), 1e-9)
            distance = (value - centre) / spread
            if abs(distance) > self.jump:
                self._values.clear()
        self._values.append(value)
        return distance
