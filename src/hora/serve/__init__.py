"""The predictor: a process of the run that answers while the others train."""
