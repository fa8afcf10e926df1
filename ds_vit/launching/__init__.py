"""Start a run on one machine or many: the launcher's command, a log per rank, the first error last, restarts.

    launch/run.py (run.py)      on the machine where the run is started: checks, starts the launcher, watches it
    launch/rank.py (rank.py)    on each host, once per rank: keeps the rank's log, passes signals on, says why it ended

Nothing here imports torch or DeepSpeed: both programs start in a fraction of a second.
"""
