"""Learning: regressors, fitting, calibration, evaluation, tracking, the saved predictor."""
