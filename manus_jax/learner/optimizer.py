"""AdamW with warm-up and a learning-rate schedule, composed from optax.

Moments are float32 for every compute dtype. Weight decay does not apply to norms and biases.
"""

from typing import Any, Literal

import jax
import optax

from manus_jax.learner.mesh import path_name

Schedule = Literal["constant", "cosine", "linear"]


def learning_rate(
    peak: float,
    schedule: Schedule,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float,
) -> optax.Schedule:
    """Linear warm-up to `peak`, then constant, or decay to `peak * min_lr_ratio` at the end."""
    rest = max(1, total_steps - warmup_steps)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=min_lr_ratio),
        "linear": lambda: optax.linear_schedule(peak, peak * min_lr_ratio, rest),
    }[schedule]()
    if warmup_steps == 0:
        return after
    # The learning rate of step 0 is peak / warmup_steps, not 0.
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(1, warmup_steps - 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def decayed(params: Any) -> Any:
    """The weight-decay mask: True for matrices, False for norms and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path_name(path).endswith(("norm", "bias")), params
    )


def adamw(
    lr: optax.Schedule,
    weight_decay: float,
    b1: float,
    b2: float,
    eps: float,
    grad_clip: float,
) -> optax.GradientTransformation:
    """Gradient clipping by global norm, followed by AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed),
    )
