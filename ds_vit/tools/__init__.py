"""Programs other than training: benchmark, parity check, doctor, evaluation of weights."""
