"""``python -m harness plan.json --out DIR``: see ``launch``."""

import sys

from .running.launch import main

if __name__ == "__main__":
    sys.exit(main())
