"""One measuring process: ``python -m fxoffload.bench ASKED ANSWER``, two pickled files of ``records``."""

import pickle
import sys
from pathlib import Path

from fxoffload.bench.worker import measure

asked, answer = map(Path, sys.argv[1:])
answer.write_bytes(pickle.dumps(measure(pickle.loads(asked.read_bytes()))))
