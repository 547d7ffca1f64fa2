"""Runs that others published: read, asked about, and compared.

``table`` reads the rows, ``places`` and ``jobs`` say them as a ``Job``, ``evaluate`` predicts and scores them with
``metrics`` and ``references``, ``report`` prints.  ``calibrated`` fits small rows and judges by larger ones, ``split``
says which, ``calibration`` writes a predictor that gained, ``widths`` keeps errors for intervals.
"""
