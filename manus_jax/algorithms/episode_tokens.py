"""The agent tokens of episodes as rows, and back.

A batch has one row per segment, and an episode whose memory forked has several. Rewards and
advantages are defined on the agent tokens of a whole episode in order. `EpisodeTokens` maps between
the two with one gather and one scatter, so that neither forks, observations nor padding can change
a number.
"""

import numpy as np

from manus_jax.data_proto import DataProto


class EpisodeTokens:
    """Where the agent tokens of a batch [rows, length] lie in a matrix [episodes, agent tokens].

    `mask` marks the tokens of the matrix, whose sizes are rounded up so that few shapes are
    compiled. `first_rows` [count] is each episode's first row in the batch.
    """

    def __init__(self, batch: DataProto) -> None:
        self._loss_mask = np.asarray(batch.batch["loss_mask"])
        episode_ids = np.asarray(batch.batch["episode_ids"])
        _, self.first_rows, self._episodes = np.unique(
            episode_ids, return_index=True, return_inverse=True
        )
        self.count = len(self.first_rows)
        owner = np.repeat(self._episodes, self._loss_mask.sum(1))
        # Stable, so the tokens of an episode stay in the order of its segments.
        order = np.argsort(owner, kind="stable")
        tokens = np.bincount(owner, minlength=self.count)
        starts = np.concatenate([[0], np.cumsum(tokens)[:-1]])
        positions = np.empty(len(owner), np.int64)
        positions[order] = np.arange(len(owner)) - np.repeat(starts, tokens)
        self._owner, self._positions = owner, positions
        self.shape = (_rounded(self.count, 8), _rounded(int(tokens.max(initial=1)), 128))
        self.mask = np.zeros(self.shape, bool)
        self.mask[owner, positions] = True

    def gather(self, column: np.ndarray) -> np.ndarray:
        """A per-token column [rows, length] as a matrix [episodes, agent tokens], 0 elsewhere."""
        matrix = np.zeros(self.shape, column.dtype)
        matrix[self._owner, self._positions] = np.asarray(column)[self._loss_mask]
        return matrix

    def scatter(self, matrix: np.ndarray) -> np.ndarray:
        """The inverse of `gather`; 0 outside the loss mask."""
        column = np.zeros(self._loss_mask.shape, matrix.dtype)
        column[self._loss_mask] = np.asarray(matrix)[self._owner, self._positions]
        return column

    def per_episode(self, values: np.ndarray) -> np.ndarray:
        """A value per row [rows] as one per episode, padded with zeros to the matrix's height."""
        padded = np.zeros(self.shape[0], values.dtype)
        padded[: self.count] = values[self.first_rows]
        return padded


def _rounded(n: int, multiple: int) -> int:
    return -(-max(1, n) // multiple) * multiple
