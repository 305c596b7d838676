"""Episodes that branch: other continuations from selected turns of an episode.

    rollout.strategy = "tree"
    rollout.strategy_parameters = {"branch_at": "entropy", "points": 2, "width": 3}

The trunk is a plain episode. At each of the selected turns, `width` - 1 branches replay the trunk's
actions in a fresh session and continue with other random numbers. A branch begins with the exact
tokens of the trunk, which are not trained on again: its loss mask starts at the branching turn.
Each episode records its parent and that turn, from which the advantage "sibling" is computed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, Protocol, cast

import numpy as np

from manus_jax.engines.cancellation import EpisodeCancellation
from manus_jax.rollout.episode import episode_context, play_turns, start_game
from manus_jax.rollout.player import EpisodeContext, Player
from manus_jax.rollout.replay import NotDeterministic, RecordedGame, replay
from manus_jax.rollout.strategies.registry import STRATEGIES, RolloutContext, declares
from manus_jax.rollout.trajectory import (
    EpisodeSpec,
    FailedEpisode,
    Outcome,
    Trajectory,
    Turn,
)

BranchAt = Literal["turns", "entropy", "failure"]
MAX_EPISODES = 1000


class ForkingPlayer(Player, Protocol):
    """A player whose state before an earlier turn can be continued by another episode."""

    def fork(self, context: EpisodeContext, number: int, turn: Turn) -> Player:
        """A player for `context` in the state before turn `number`, which was `turn`."""


def _check(branch_at: BranchAt, turns: Sequence[int], points: int, width: int) -> None:
    if width < 2:
        raise ValueError(
            f"width = {width} continuations of a turn, the trunk's included: 2 or more"
        )
    if branch_at == "turns":
        if not turns or min(turns) < 0:
            raise ValueError(f"turns = {turns!r} must be a list of turns, counted from 0")
        if points != 1 or len({*turns}) < len(turns):
            raise ValueError("turns are listed once each, and points is for the other choices")
    elif turns or points < 1:
        raise ValueError(
            f"branch_at = {branch_at!r} chooses the turns itself: set points to 1 or more, and "
            "leave out turns"
        )
    if (episodes := _episodes(branch_at, turns, points, width)) > MAX_EPISODES:
        raise ValueError(f"a tree of {episodes} episodes: {MAX_EPISODES} at most")


def _episodes(branch_at: BranchAt, turns: Sequence[int], points: int, width: int) -> int:
    return 1 + (len(turns) or points) * (width - 1)


@STRATEGIES.register("tree")
@declares(check=_check, episodes=_episodes, in_validation=False, replays=True)
def tree(
    spec: EpisodeSpec,
    rollout: RolloutContext,
    *,
    branch_at: BranchAt = "entropy",
    turns: Sequence[int] = (),
    points: int = 1,
    width: int = 2,
) -> list[Outcome]:
    """Plays the trunk and its branches, one after another; the trunk comes first.

    Branches start before the listed `turns`, before the `points` turns whose tokens had the lowest
    probability ("entropy"), or, if the trunk fails, before the first turns without an accepted
    action and then evenly spaced ones ("failure"). If the environment turns out not to be
    deterministic, the whole tree is one failed episode.
    """
    growing = _Tree(spec, rollout)
    trunk = rollout.with_retries(spec, growing.play_trunk)
    played: list[Outcome] = [trunk]
    if isinstance(trunk, Trajectory):
        for turn in branching_turns(trunk, branch_at, turns, points):
            for number in range(1, width):
                branch = dataclasses.replace(spec, uid=f"{spec.uid}^{turn}.{number}")
                play = functools.partial(growing.play_branch, branch, trunk, turn)
                try:
                    played.append(rollout.with_retries(branch, play))
                except NotDeterministic as error:
                    return [FailedEpisode(spec, "not_deterministic", str(error), trunk.attempts)]
    return played


class _Tree:
    """A tree under construction: the trunk's player and game, which branches continue."""

    def __init__(self, spec: EpisodeSpec, rollout: RolloutContext) -> None:
        assert spec.task.env is not None and spec.task.item is not None
        self._env, self._item = spec.task.env, spec.task.item
        self._spec, self._rollout = spec, rollout
        self._player: Player | None = None
        self._game: RecordedGame | None = None

    def play_trunk(self, cancellation: EpisodeCancellation, attempt: int) -> Trajectory:
        context = episode_context(self._spec, self._rollout.settings, cancellation, attempt)
        with self._rollout.pool.lease(self._env, cancellation.begin) as session:
            player, game = self._rollout.agent.player(context), RecordedGame(session)
            self._player, self._game = player, game
            try:
                return play_turns(context, game, player, start_game(context, game, player))
            finally:
                player.close()

    def play_branch(
        self,
        spec: EpisodeSpec,
        trunk: Trajectory,
        turn: int,
        cancellation: EpisodeCancellation,
        attempt: int,
    ) -> Trajectory:
        """Plays turn number `turn` of the trunk, and all later ones, differently."""
        assert self._game is not None
        before, replaced = trunk.turns[:turn], trunk.turns[turn]
        context = episode_context(spec, self._rollout.settings, cancellation, attempt)
        with self._rollout.pool.lease(self._env, cancellation.begin) as session:
            sent = [played.valid for played in before]
            replay(session, self._game, self._item, spec.task.item_id, sent)
            player = cast(ForkingPlayer, self._player).fork(context, turn, replaced)
            prefix = [_as_context(played, replaced) for played in before]
            try:
                branch = play_turns(context, session, player, trunk.first_observation, prefix)
            finally:
                player.close()
        return dataclasses.replace(branch, parent=trunk.uid, branch_turn=turn)


def branching_turns(
    trunk: Trajectory, branch_at: BranchAt, turns: Sequence[int], points: int
) -> list[int]:
    """The turns of the trunk that are played differently by branches, in order."""
    count = len(trunk.turns)
    if branch_at == "turns":
        return sorted(turn for turn in turns if turn < count)
    if branch_at == "entropy":
        by_entropy = np.argsort(-_entropies(trunk), kind="stable")
        return sorted(by_entropy[:points].tolist())
    if trunk.success:
        return []
    refused = [number for number, turn in enumerate(trunk.turns) if not turn.accepted]
    spaced = [(n + 1) * count // (points + 1) for n in range(points)]
    return sorted([*dict.fromkeys([*refused[:points], *spaced])][:points])


def _entropies(trunk: Trajectory) -> np.ndarray:
    """The mean negative log-prob of the sampled tokens of each turn, [turns]."""
    total, tokens = np.zeros((2, len(trunk.turns)))
    for segment in trunk.segments:
        sampled = segment.turn_ids[segment.loss_mask]
        np.add.at(total, sampled, -segment.log_probs[segment.loss_mask])
        np.add.at(tokens, sampled, 1)
    return total / np.maximum(tokens, 1)


def _as_context(turn: Turn, replaced: Turn) -> Turn:
    """A turn of the trunk as part of a branch that replaces a later one.

    Its tokens are in the branch's first segment, as context, if the trunk had both turns in one
    segment; otherwise the branch does not contain them.
    """
    untimed = dataclasses.replace(turn, generation_seconds=0.0, environment_seconds=0.0, segment=0)
    if turn.segment == replaced.segment:
        return untimed
    return dataclasses.replace(untimed, start=0, stop=0, forced=0)
