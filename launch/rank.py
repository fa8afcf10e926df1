"""One rank on this host: its log, its signals, why it ended. Started by launch/run.py through a launcher.

    python launch/rank.py --probe        what is here: clone, packages, a free port

ds_vit/launching/rank.py has the rest of the story.
"""

import signal
import sys
from pathlib import Path

# A signal that comes before the rank is there waits until it can be passed on (run_rank lets it through).
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from ds_vit.launching.rank import main

    sys.exit(main())
