"""How commands end: a mistake of the user's is one line on stderr and exit code 2.

Everything else propagates with its traceback, because it is ours.
"""

import sys
from collections.abc import Callable

from manus_jax.agentgym.failures import EnvironmentSetupError
from manus_jax.chat import ChatTemplateError, ConversationError
from manus_jax.config import ConfigError
from manus_jax.dataset import DatasetError
from manus_jax.learner.mesh import MeshError
from manus_jax.learner.packing import PackingError
from manus_jax.models.architecture import ModelError
from manus_jax.rewards import RewardError
from manus_jax.rollout.engine import EngineError
from manus_jax.runtime.checkpoints import CheckpointError
from manus_jax.runtime.evaluation import EvaluationError
from manus_jax.runtime.run_directory import RunDirectoryError
from manus_jax.runtime.stopping import Stopped
from manus_jax.runtime.training import TrainingError

USER_ERRORS = (
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    ConversationError,
    DatasetError,
    EngineError,
    EnvironmentSetupError,
    EvaluationError,
    MeshError,
    ModelError,
    PackingError,
    RewardError,
    RunDirectoryError,
    TrainingError,
)


def run(
    main: Callable[[list[str]], None],
    interrupted: str = "the same command goes on from the last checkpoint",
) -> None:
    """Runs a command on the program's arguments; `interrupted` is what Ctrl-C leaves behind."""
    try:
        main(sys.argv[1:])
    except USER_ERRORS as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.code)
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        sys.exit(130)
