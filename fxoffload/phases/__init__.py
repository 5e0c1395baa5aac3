"""Phases of RL post-training: parameters, gradients and optimizer state leave the GPU and return."""

from __future__ import annotations

from fxoffload.phases.guarding.sentinel import OffloadedError as OffloadedError
from fxoffload.phases.handle import Handle as Handle
from fxoffload.phases.manager import PhaseManager as PhaseManager
from fxoffload.phases.metrics import Transition as Transition
from fxoffload.phases.moving.storages import Where as Where
from fxoffload.phases.phase import Phase as Phase
from fxoffload.phases.residue import residue as residue
