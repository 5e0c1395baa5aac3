"""MoE checkpoints in three layouts, converted by streaming, with nothing but the layout changed.

See docs/moe_checkpoints.md. Nothing here needs a GPU or loads a model.
"""

from fxoffload.checkpoints.convert import Conversion as Conversion
from fxoffload.checkpoints.convert import convert as convert
from fxoffload.checkpoints.convert import merge as merge
from fxoffload.checkpoints.convert import split as split
from fxoffload.checkpoints.convert import verify as verify
from fxoffload.checkpoints.describe import Inspection as Inspection
from fxoffload.checkpoints.describe import TowerInspection as TowerInspection
from fxoffload.checkpoints.describe import inspect as inspect
from fxoffload.checkpoints.errors import BrokenCheckpointError as BrokenCheckpointError
from fxoffload.checkpoints.errors import CheckpointError as CheckpointError
from fxoffload.checkpoints.errors import DestinationError as DestinationError
from fxoffload.checkpoints.errors import DiskFullError as DiskFullError
from fxoffload.checkpoints.errors import LayoutError as LayoutError
from fxoffload.checkpoints.errors import MismatchError as MismatchError
from fxoffload.checkpoints.errors import UnknownFamilyError as UnknownFamilyError
from fxoffload.checkpoints.errors import UnsupportedCheckpointError as UnsupportedCheckpointError
from fxoffload.checkpoints.families import FAMILIES as FAMILIES
from fxoffload.checkpoints.families import Family as Family
from fxoffload.checkpoints.verify import Verification as Verification
