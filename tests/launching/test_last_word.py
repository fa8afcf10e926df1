"""The sentence that matters stands at the end of what a launcher prints, not above its own lines."""

import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ds_vit.launching.last_word import say_last

SENTENCE = 'train.py: error: "$(false)" is no flag; drop it'

# Like DeepSpeed's launcher: known by its command line, it outlives its rank, says something long, and ends with 2.
LAUNCHER = """
import subprocess, sys, time
rank = f"from ds_vit.launching.last_word import say_last; say_last({sys.argv[2]!r})"
subprocess.run([sys.executable, "-c", rank], check=True)
time.sleep(0.3)
print("[ERROR] a dump of the command")
"""


def test_after_deepspeeds_launcher():
    """A sentence that the launcher's own lines come after, that a shell takes apart, or that somebody must wait for."""
    command = [sys.executable, "-c", LAUNCHER, "deepspeed.launcher.launch", SENTENCE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["[ERROR] a dump of the command", SENTENCE]


# Like mpirun: known by its name, it takes its ranks' output while they live, and says something long itself.
MPIRUN = """
import subprocess, sys, time
rank = f"from ds_vit.launching.last_word import say_last; say_last('too early'); say_last({sys.argv[1]!r})"
subprocess.run([sys.argv[2], "-c", rank], check=True, stderr=subprocess.DEVNULL)
time.sleep(0.3)
sys.stderr.write("prterun has exited due to; a rank's unfinished line")
"""


def test_after_mpirun():
    """The same where the ranks' own stderr leads nowhere any more; and an earlier sentence that is not true by now."""
    command = ["prterun", "-c", MPIRUN, SENTENCE, sys.executable]
    done = subprocess.run(command, executable=sys.executable, stderr=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stderr.splitlines() == ["prterun has exited due to; a rank's unfinished line", SENTENCE]


STAYS = """
import subprocess, sys, time
rank = ("from ds_vit.launching import last_word; last_word._PATIENCE_SECONDS = int(sys.argv[1]); "
        "last_word.say_last('it has ended'); last_word.say_nothing_last() if sys.argv[2:] else None")
subprocess.run([sys.argv[1], "-c", "import sys; " + rank, *sys.argv[2:]], check=True)
time.sleep(float(sys.argv[2]) + 0.5)
"""


@pytest.mark.parametrize("words", [["1"], ["0", "taken back"]])
def test_nothing_that_is_not_true(words):
    """A launcher that lives longer than anybody waits; a sentence from before all went well."""
    command = ["prterun", "-c", STAYS, sys.executable, *words]
    done = subprocess.run(command, executable=sys.executable, stderr=subprocess.PIPE, text=True, check=True, timeout=60)
    time.sleep(0.5)
    assert done.stderr == ""


def test_in_torchruns_last_lines(tmp_path):
    """torchrun's report of the failed rank with a pointer to documentation in place of a reason."""
    file = tmp_path / "error.json"
    say_last(SENTENCE, {"TORCHELASTIC_ERROR_FILE": str(file)})
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert abs(failure.timestamp - time.time()) < 60
    assert SENTENCE in str(ChildFailedError("launch/train.py", {0: failure})).splitlines()[-2]


def test_without_a_launcher(capfd):
    """The sentence twice in a terminal."""
    say_last(SENTENCE, {})
    assert capfd.readouterr() == ("", "")
