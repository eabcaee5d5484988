"""Seeds of completions: unrelated streams of random numbers from a few whole numbers."""

from __future__ import annotations

MASK = 2**64 - 1


def mix(*words: int) -> int:
    """One signed 64-bit seed from several numbers (splitmix64; Steele, Lea, Flood, OOPSLA 2014)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
