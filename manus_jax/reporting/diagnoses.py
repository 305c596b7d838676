"""Recognises runs that cannot learn, from their metrics, and says what usually helps.

`DIAGNOSES` is a table: a condition on the metrics of the last steps, what it means, and remedies.
`Diagnostician` takes the steps of a run in order and reports each diagnosis when its condition
begins to hold, and again only if it ended and came back. It has no other input, so a resumed run
and the report come to the same findings as the run itself.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

Metrics = Mapping[str, float]
Condition = Callable[[Sequence[Metrics], Metrics], bool]
"""(the metrics of the last steps, those of the run's first step) → whether the diagnosis holds."""

GONE_AFTER = 5  # steps without the condition, after which a diagnosis has ended
SUCCESSFUL = 0.9  # success rate from which uniform behaviour is not a problem

_EASIER = (
    "easier tasks or a shorter horizon; a better start (warm_start.steps, or model.path of a "
    "fine-tuned model)"
)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """`message` may contain metrics of the last step in braces; `window` is a number of steps."""

    message: str
    remedy: str
    window: int
    holds: Condition


@dataclasses.dataclass
class Finding:
    """A diagnosis that held from `step` to `last`, possibly with short interruptions."""

    step: int
    last: int
    text: str


def _get(metrics: Metrics, name: str) -> float:
    """The metric; NaN, for which every comparison is false, if it is absent."""
    return metrics.get(name, math.nan)


def _each(test: Callable[[Metrics], bool]) -> Condition:
    """The test holds in every step of the window."""
    return lambda steps, first: all(test(metrics) for metrics in steps)


def _struggles(metrics: Metrics) -> bool:
    return _get(metrics, "episode/success_rate") < SUCCESSFUL


def _no_signal(metrics: Metrics) -> bool:
    return _get(metrics, "rollout/groups_with_signal") == 0


def _same_end(steps: Sequence[Metrics], first: Metrics) -> bool:
    """All episodes ended for the same reason, and not because the environment ended them."""
    reasons = ("max_turns", "context", "gave_up")
    shares = [[_get(m, f"episode/ended_by/{reason}") for m in steps] for reason in reasons]
    return any(min(of_reason) == 1 for of_reason in shares) and all(map(_struggles, steps))


def _repeats_itself(steps: Sequence[Metrics], first: Metrics) -> bool:
    """Within turns, or from turn to turn.

    An agent's text repeats about a tenth of its pairs of tokens and long turns more, so the first
    step counts as well.
    """
    usual = first.get("repetition/within_turns", 0.0)
    return all(
        (
            _get(m, "repetition/within_turns") > min(0.5, usual + 0.2)
            or _get(m, "repetition/between_turns") > 0.9
        )
        and _struggles(m)
        for m in steps
    )


def _entropy_collapsed(steps: Sequence[Metrics], first: Metrics) -> bool:
    start = _get(first, "rollout/entropy")
    return all(_get(m, "rollout/entropy") < 0.1 * start and _struggles(m) for m in steps)


def _entropy_exploded(steps: Sequence[Metrics], first: Metrics) -> bool:
    start = _get(first, "rollout/entropy")
    return all(_get(m, "rollout/entropy") > 5 * start and _struggles(m) for m in steps)


def _constant_reward(steps: Sequence[Metrics], first: Metrics) -> bool:
    """All episodes of all steps have the same reward."""
    low = min(_get(m, "episode/reward/min") for m in steps)
    high = max(_get(m, "episode/reward/max") for m in steps)
    return low == high and all(_struggles(m) for m in steps)


DIAGNOSES = (
    Diagnosis(
        "no group has episodes with different rewards, so there is nothing to learn from "
        "(success {episode/success_rate:.0%})",
        f"{_EASIER}; a higher rollout.temperature; a larger train.group_size or train.batch_size",
        window=1,
        holds=_each(lambda m: _no_signal(m) and _struggles(m)),
    ),
    Diagnosis(
        "nearly all episodes succeed, and no group has episodes with different rewards",
        "harder tasks, or stop: the model has learned these",
        window=3,
        holds=_each(lambda m: _no_signal(m) and not _struggles(m)),
    ),
    Diagnosis(
        "the reward of every episode has been {episode/reward/mean:g}",
        f"{_EASIER}; a reward for partial progress (algorithm.reward); check that the environment "
        "rewards the actions that the policy sends",
        window=5,
        holds=_constant_reward,
    ),
    Diagnosis(
        "no episode is ended by the environment; all end at the same limit (turns, tokens, or the "
        "policy gave up)",
        f"more rollout.max_turns or rollout.max_total_tokens; {_EASIER}",
        window=2,
        holds=_same_end,
    ),
    Diagnosis(
        "the policy repeats itself: {repetition/within_turns:.0%} of the pairs of tokens occurred "
        "before in their turn, and {repetition/between_turns:.0%} of the turns are equal to the "
        "previous one",
        "a lower optimizer.lr; a KL penalty (algorithm.kl_placement, algorithm.kl_coef); fewer "
        "rollout.max_tokens_per_turn; a longer warm start",
        window=2,
        holds=_repeats_itself,
    ),
    Diagnosis(
        "the entropy of the policy has collapsed to {rollout/entropy:.3g} nats per token, less "
        "than a tenth of its first value",
        "a lower optimizer.lr; algorithm.entropy_coef > 0; a KL penalty (algorithm.kl_coef); a "
        "higher rollout.temperature; continue from an earlier checkpoint",
        window=2,
        holds=_entropy_collapsed,
    ),
    Diagnosis(
        "the policy has become random: its entropy is {rollout/entropy:.3g} nats per token, more "
        "than five times its first value",
        "a lower optimizer.lr or optimizer.grad_clip; a KL penalty (algorithm.kl_coef); continue "
        "from an earlier checkpoint",
        window=2,
        holds=_entropy_exploded,
    ),
    Diagnosis(
        "few actions have an effect: {env/ratio_of_valid_action:.0%} are well-formed and not "
        "refused by the environment (it refuses {env/ratio_of_rejected_action:.0%}), and after "
        "{env/ratio_of_unchanged_observation:.0%} of all turns the observation is unchanged",
        "a warm start (warm_start.steps); another rollout.action_format; the environment's own "
        "prompt (rollout.prompt_source); rollout.invalid_action_penalty",
        window=2,
        holds=_each(
            lambda m: (
                (
                    _get(m, "env/ratio_of_valid_action") < 0.5
                    or _get(m, "env/ratio_of_unchanged_observation") > 0.8
                )
                and _struggles(m)
            )
        ),
    ),
)


class Diagnostician:
    """Takes the metrics of a run, step by step."""

    def __init__(self, past: Iterable[Metrics] = (), table: Sequence[Diagnosis] = DIAGNOSES):
        self._table = table
        self._first: Metrics | None = None
        self._recent: list[Metrics] = []
        self._latest: dict[Diagnosis, Finding] = {}
        self.findings: list[Finding] = []
        for metrics in past:
            self.after_step(metrics)

    def after_step(self, metrics: Metrics) -> list[Finding]:
        """The new findings; lines without episodes, such as validation alone, are skipped."""
        if not metrics.get("rollout/episodes"):
            return []
        step = int(metrics["step"])
        self._first = self._first or metrics
        longest = max(diagnosis.window for diagnosis in self._table)
        self._recent = [*self._recent, metrics][-longest:]
        new = []
        for diagnosis in self._table:
            steps = self._recent[-diagnosis.window :]
            if len(steps) < diagnosis.window or not diagnosis.holds(steps, self._first):
                continue
            latest = self._latest.get(diagnosis)
            if latest is None or step - latest.last > GONE_AFTER:
                latest = self._latest[diagnosis] = Finding(step, step, _text(diagnosis, metrics))
                new.append(latest)
            latest.last = step
        self.findings += new
        return new


def _text(diagnosis: Diagnosis, metrics: Metrics) -> str:
    """The message with its numbers, and the remedies."""
    numbers = collections.defaultdict(lambda: math.nan, metrics)
    return f"{diagnosis.message.format_map(numbers)}. What often helps: {diagnosis.remedy}"
