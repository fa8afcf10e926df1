"""One rank on this host: its log, its signals, why it ended. Started by launch/run.py through a launcher.

    python launch/rank.py --probe        is this clone here? prints a free port

ds_vit/launching/rank.py has the rest of the story.
"""

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.launching.rank import main

if __name__ == "__main__":
    sys.exit(main())
