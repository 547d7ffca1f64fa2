"""Published measured runs: read them, predict them, compare.

``runs_table`` reads the rows; ``row_hardware`` and ``row_jobs`` turn each into a ``Job``.  ``evaluate`` predicts and
scores them (``scored_row``) with ``error_metrics`` and beside ``naive_references``; ``evaluation_report`` prints the
result.  ``calibration_gain`` fits the small runs of every source (``calibration_split`` chooses them) and scores the
larger ones; ``calibrate_runs`` writes a calibrated predictor.  ``tools/shipped_data.py`` writes the errors that
the intervals of predictors from public tables use.
"""
