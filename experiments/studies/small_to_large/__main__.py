"""``stepsight experiment small-to-large``: both halves, or a part of them."""

from __future__ import annotations

import sys

from stepsight.experiments.studies.small_to_large import main

sys.exit(main())
