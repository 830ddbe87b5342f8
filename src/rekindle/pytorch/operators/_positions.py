"""Where random number generators stood, in little memory (R5).

A CPU's generator is a Mersenne twister (Matsumoto and Nishimura 1998): 624 words, and where among
them it stands. Once all have been drawn the next 624 are made of them. Its state takes 5,056 bytes,
more than many a dropout's mask. So the words are kept once for a stretch of `_MOST` such turns, and
of a position on it only by how many turns it is ahead. To find that out while the program draws,
another generator follows, a turn at a time; it gives up where that is not what happened since
(another seed, another generator, or too much drawn at once: then the results are large, too).

The states of other devices' generators are a few bytes and kept as they are.
"""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

_WORDS: Final = 624
_BYTES: Final = 4 * _WORDS
_BEGIN, _END, _STATE_BYTES = 24, 24 + 8 * _WORDS, 5056  # of the words in a state, as 8 bytes each
_MOST: Final = 64  # turns: some tens of microseconds
_PAUSE: Final = 8  # after the follower gave up: positions for which it does not try


@final
class _Twister:
    """Makes words of words. NumPy's generator has the same recurrence."""

    def __init__(self) -> None:
        self._bits = np.random.MT19937(0)
        self._words: int = self._bits.ctypes.state_address  # and after them, in an int, where it is
        self._at = ctypes.c_int.from_address(self._words + _BYTES)

    def put(self, words: bytes) -> None:
        ctypes.memmove(self._words, words, _BYTES)

    def turn(self, times: int = 1) -> bytes:
        """The words after so many turns."""
        if times:
            self._at.value = _WORDS
            self._bits.random_raw(_WORDS * times, output=False)
        return ctypes.string_at(self._words, _BYTES)


_twister: list[_Twister] = []  # made when it is needed
_using = Lock()


@final
class Position:
    """Where a CPU's generator stood."""

    __slots__ = ("_around", "_turns", "_words")

    def __init__(self, words: bytes, turns: int, around: bytes) -> None:
        self._words = words  # shared with others
        self._turns = turns  # from those on
        self._around = around  # what the state has before and after its words

    def state(self) -> Tensor:
        """The state that it had there."""
        with _using:
            if not _twister:
                _twister.append(_Twister())
            _twister[0].put(self._words)
            words = np.frombuffer(_twister[0].turn(self._turns), np.uint32)
        state = torch.default_generator.get_state()  # as large, and of nobody else
        begin, end = self._around[:_BEGIN], self._around[_BEGIN:]
        data = begin + words.astype(np.uint64).tobytes() + end
        ctypes.memmove(state.data_ptr(), data, _STATE_BYTES)
        return state


@final
class Positions:
    """Where generators stood when a program drew from them, one operator after the other."""

    def __init__(self) -> None:
        self._follower: _Twister | None = None
        self._kept = b""  # the words from which the stretch starts
        self._now = b""  # those that the follower is at,
        self._turns = 0  # so many turns later
        self._pause = 0

    def note(self, state: Tensor) -> Tensor | Position:
        """What to keep in the place of a generator's `state`."""
        if state.nbytes != _STATE_BYTES:
            return state
        data = ctypes.string_at(state.data_ptr(), _STATE_BYTES)
        words = np.frombuffer(data, np.uint64, _WORDS, _BEGIN).astype(np.uint32).tobytes()
        if words != self._now and not self._reach(words):
            self._kept, self._now, self._turns = words, words, 0
        return Position(self._kept, self._turns, data[:_BEGIN] + data[_END:])

    def _reach(self, words: bytes) -> bool:
        """Whether the follower gets there on this stretch."""
        if self._pause or not self._kept:
            self._pause = max(0, self._pause - 1)
            return False
        if self._follower is None:
            self._follower = _Twister()
        self._follower.put(self._now)
        for turns in range(self._turns + 1, _MOST + 1):
            if self._follower.turn() == words:
                self._now, self._turns = words, turns
                return True
        self._pause = 0 if self._turns else _PAUSE
        return False
