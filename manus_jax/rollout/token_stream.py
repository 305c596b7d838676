"""The tokens of a segment while it is played: prompts are given, turns are sampled."""

from collections.abc import Sequence

import numpy as np

from manus_jax.engines.protocol import Generation
from manus_jax.rollout.trajectory import Segment

_SHARED: dict[int, int] = {}


def _shared(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(_SHARED.setdefault, ids, ids))


class TokenStream:
    """A segment under construction.

    A prompt is a tuple that extends the previous one. Equal ids are one object: the new tuple
    counts a reference to each, and with thousands of episodes in flight objects of their own would
    not be in the processor's cache.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = _shared(ids)
        self._new: list[int] = []
        self._sampled: list[tuple[int, Generation, int]] = []  # (start, tokens, turn)

    def __len__(self) -> int:
        return len(self._ids) + len(self._new)

    @property
    def ids(self) -> tuple[int, ...]:
        if self._new:
            self._ids += _shared(self._new)
            self._new = []
        return self._ids

    @property
    def known_experts(self) -> int:
        """The number of leading tokens whose experts the engine has returned."""
        if not self._sampled or self._sampled[-1][1].experts is None:
            return 0
        start, last, _ = self._sampled[-1]
        return start + len(last.token_ids) - 1

    def since(self, start: int) -> tuple[int, ...]:
        return (*self._ids[start:], *self._new)

    def add_given(self, ids: Sequence[int]) -> None:
        self._new += ids

    def add_sampled(self, generation: Generation, turn: int) -> None:
        self._sampled.append((len(self), generation, turn))
        self._new += generation.token_ids

    def frozen(self) -> Segment | None:
        """The tokens up to the last sampled one; None if there is none."""
        if not self._sampled:
            return None
        start, last, _ = self._sampled[-1]
        end = start + len(last.token_ids)
        log_probs = np.zeros(end, np.float32)
        versions, turn_ids = np.full((2, end), -1, np.int32)
        for start, generation, turn in self._sampled:
            span = slice(start, start + len(generation.token_ids))
            log_probs[span], versions[span] = generation.log_probs, generation.versions
            turn_ids[span] = turn
        return Segment(
            token_ids=np.array(self.ids[:end], np.int32),
            loss_mask=turn_ids >= 0,
            log_probs=log_probs,
            versions=versions,
            turn_ids=turn_ids,
            experts=self._experts(end),
        )

    def _experts(self, length: int) -> np.ndarray | None:
        """The experts of the first `length` tokens; those returned first, if some were twice."""
        found = [(s + len(g.token_ids) - 1, g.experts) for s, g, _ in self._sampled]
        returned = [(end, experts) for end, experts in found if experts is not None]
        if not returned:
            return None
        joined = np.full((length, *returned[0][1].shape[1:]), -1, np.int16)
        known = 0
        for end, experts in returned:
            start = max(known, end - len(experts))
            joined[start:end] = experts[len(experts) - (end - start) :]
            known = end
        return joined
