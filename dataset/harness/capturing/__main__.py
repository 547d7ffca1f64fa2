"""``python -m harness.capturing request.json``: run a script as one rank of a fake world; see ``running_script``."""

import sys

from .running_script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
