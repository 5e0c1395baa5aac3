"""The phases of a colocated RL step, and the groups that each of them needs on the device."""

from __future__ import annotations

import enum
from dataclasses import dataclass

PARAMS, BUFFERS, GRADS, OPTIMIZER, EXTRA = "params", "buffers", "grads", "optimizer", "extra"
# In the order in which they leave: the group that is needed last leaves first.
GROUPS = (GRADS, OPTIMIZER, EXTRA, BUFFERS, PARAMS)
# A storage that lies in several groups belongs to the first of these.
BY_PRECEDENCE = (PARAMS, BUFFERS, GRADS, OPTIMIZER, EXTRA)


class Phase(str, enum.Enum):
    """Where every byte is.

    =========== ================ ======== ==================== ====================== ==================
    phase       params, buffers  grads    optimizer, extra     leaves meanwhile       returns
    =========== ================ ======== ==================== ====================== ==================
    ROLLOUT     host             host [1] host                 nothing: it has left   nothing
    LOGPROB     device           host [1] as it was [2]        optimizer [2]          params, by layers
    TRAIN       device           device   device               nothing                optimizer, by step
    SYNC        as they were [3] host [1] host [4]             optimizer              nothing
    =========== ================ ======== ==================== ====================== ==================

    [1] With ``grads="drop"`` gradients are set to None instead; with ``"error"`` any gradient is a RuntimeError.
    [2] With ``offload_optimizer_for_logprob=True`` on the host. By default it stays where it is: after a rollout on
        the host, after training on the device.
    [3] ``stream_weights`` reads them from either place; ``weights_on_device`` brings them back.
    [4] With ``offload_optimizer_for_refit=False`` it stays where it is.
    """

    ROLLOUT = "rollout"
    LOGPROB = "logprob"
    TRAIN = "train"
    SYNC = "sync"

    @classmethod
    def of(cls, phase: Phase | str) -> Phase:
        """The phase of that name.

        Raises:
            ValueError: there is none.
        """
        try:
            return cls(phase)
        except ValueError:
            known = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"expected one of the phases {known}, found {phase!r}") from None


@dataclass(frozen=True, slots=True)
class PhaseOptions:
    """The user's choices; see ``PhaseManager``."""

    grads: str = "keep"
    offload_optimizer_for_logprob: bool = False
    offload_optimizer_for_refit: bool = True

    def __post_init__(self) -> None:
        if self.grads not in ("keep", "drop", "error"):
            raise ValueError(f'expected grads="keep", "drop" or "error", found {self.grads!r}')


def leaving(phase: Phase, options: PhaseOptions) -> tuple[str, ...]:
    """The groups that are on the host during a phase, in the order in which they leave."""
    if phase is Phase.TRAIN:
        return ()
    if phase is Phase.ROLLOUT:
        return GROUPS
    of_logprob = phase is Phase.LOGPROB
    optimizer = options.offload_optimizer_for_logprob if of_logprob else options.offload_optimizer_for_refit
    return (GRADS, OPTIMIZER, EXTRA) if optimizer else (GRADS,)


def returning(phase: Phase) -> tuple[str, ...]:
    """The groups that are on the device during a phase, in the order in which they are needed."""
    return {
        Phase.ROLLOUT: (),
        Phase.LOGPROB: (PARAMS, BUFFERS),
        Phase.TRAIN: (BUFFERS, PARAMS, GRADS, OPTIMIZER, EXTRA),
        Phase.SYNC: (),
    }[phase]


def as_groups(groups: tuple[str, ...]) -> tuple[str, ...]:
    """The named groups in the order in which they leave; all of them for no name.

    Raises:
        ValueError: an unknown name.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ValueError(f"expected groups out of {', '.join(map(repr, GROUPS))}, found {unknown[0]!r}")
    return tuple(group for group in GROUPS if not groups or group in groups)
