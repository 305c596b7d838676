"""AdamW or Adafactor with warm-up and a learning-rate schedule, composed from optax.

AdamW's first moment may be bfloat16. The second is always float32: with b2 = 0.999 its changes are
smaller than bfloat16 can represent. Weight decay does not apply to norms and biases.
"""

from typing import Any, Literal

import jax
import optax

from manus_jax.config.settings import OptimizerSettings
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


def make_optimizer(lr: optax.Schedule, settings: OptimizerSettings) -> optax.GradientTransformation:
    """Gradient clipping by global norm, followed by AdamW or Adafactor."""
    return optax.chain(
        optax.clip_by_global_norm(settings.grad_clip), _OPTIMIZERS[settings.name](lr, settings)
    )


def _adamw(lr: optax.Schedule, settings: OptimizerSettings) -> optax.GradientTransformation:
    return optax.adamw(
        lr,
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        # None is the type of the parameters.
        mu_dtype=None if settings.moment_dtype == "float32" else settings.moment_dtype,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )


def _adafactor(lr: optax.Schedule, settings: OptimizerSettings) -> optax.GradientTransformation:
    """Adafactor without momentum; learning rate and weight decay mean the same as for AdamW."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(settings.weight_decay, decayed),
        optax.scale_by_learning_rate(lr),
    )


_OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor}
