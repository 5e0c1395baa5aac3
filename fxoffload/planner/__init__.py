"""Predicts what a training step will take: bytes on the device, time, and copies that compute has to wait for."""

from fxoffload.planner.link import ConstantRates as ConstantRates
from fxoffload.planner.link import CopyRates as CopyRates
from fxoffload.planner.simulate import Boundary as Boundary
from fxoffload.planner.simulate import SimEvent as SimEvent
from fxoffload.planner.simulate import Simulation as Simulation
from fxoffload.planner.simulate import simulate as simulate
from fxoffload.planner.steps import SegmentStep as SegmentStep
from fxoffload.planner.steps import StorageInfo as StorageInfo
from fxoffload.planner.steps import Take as Take
from fxoffload.planner.steps import TrainingStep as TrainingStep
from fxoffload.planner.steps import from_graphs as from_graphs
