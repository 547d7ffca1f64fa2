"""Tables of measurements that others published, or that a user took, read into one form."""

from stepsight.dataset.tables.formats import FORMATS, check_table_output, read_table
from stepsight.dataset.tables.measurements import Measurements, SourceFile, summary, summary_text

__all__ = ["FORMATS", "Measurements", "SourceFile", "check_table_output", "read_table", "summary", "summary_text"]
