"""One measuring process: ``python -m fxoffload.bench ASKED ANSWER``, two JSON files."""

import sys
from pathlib import Path

from fxoffload.bench.worker import serve

serve(Path(sys.argv[1]), Path(sys.argv[2]))
