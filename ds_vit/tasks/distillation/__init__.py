"""`--task classification` with `--kd-model-name`: a student learns from a fixed teacher."""
