"""Tools for your own Optuna study: legal strategies of a job, memory as a constraint, lower bounds that prune.

``examples/own_study.py`` is a whole study with several workers.  ``stepsight.search`` needs none of this: it finds the
best strategy by itself.
"""

from stepsight.experiments.search.study import LegalStrategies

__all__ = ["LegalStrategies"]
