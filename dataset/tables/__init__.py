"""Tables of measurements that others published, or that a user took, read into one form."""

from stepsight.dataset.tables.table import Measurements, SourceFile

__all__ = ["Measurements", "SourceFile"]
