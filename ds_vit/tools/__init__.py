"""Programs beside training: benchmark, parity check, doctor, evaluation of weights."""
