"""Makes the helpers beside the tests importable (the tests themselves are imported by path)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
