"""How it learns: regressors, fitting, calibration, evaluation, tracking, the saved predictor."""
