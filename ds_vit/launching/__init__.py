"""Start a run on one machine or many: the launcher's command, a log a rank, the first error last, restarts.

    launch/run.py (run.py)      on the machine where the run is started: checks, starts the launcher, watches it
    launch/rank.py (rank.py)    on every host, once a rank: keeps the rank's log, passes signals on, tells why it ended

Nothing here imports torch or DeepSpeed: both programs start in a fraction of a second.
"""
