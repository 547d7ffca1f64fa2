"""Published measured runs: read them, predict them, compare.

``runs_table`` reads the rows; ``row_jobs`` turns each into a ``Job``.  ``evaluate`` predicts and scores them with
``error_metrics``, and prints the result.  ``table_errors`` does the same for tables of ops and collectives.
"""
