"""The errors a user can meet.

::

    ValueError
     +-- StepsightError          anything a user can put right; its text states the rule and the values
          +-- JobError           a job that cannot exist (degrees, sizes, unknown keys)
          +-- TraceError         a trace or run folder that is missing, truncated or inconsistent
          +-- TableError         a table of measurements that is malformed
          +-- PredictorError     a folder that is no predictor, or one for another hardware
          +-- CollectError       a collection that cannot lawfully or technically run here

``assert`` is for our own bugs.
"""


class StepsightError(ValueError):
    """A mistake that the user can put right."""


class JobError(StepsightError):
    """A job that breaks a rule; the message lists every broken rule."""


class TraceError(StepsightError):
    """A trace or run folder that cannot be read whole."""


class TableError(StepsightError):
    """A table of measurements that cannot be read whole."""


class PredictorError(StepsightError):
    """A folder that is no predictor, or a predictor for another hardware."""


class CollectError(StepsightError):
    """A collection that cannot run here."""
