"""`ds-vit doctor`: what would keep a run from starting or slow it down, found beforehand, with the remedy.

facts.py      what one host says about itself: plain data, gathered on that host
checks.py     pure functions over all hosts' facts → findings
remote.py     asks every host at once, over ssh as DeepSpeed's launcher goes, or here
measure.py    the ranks of the small collectives: latency and bandwidth by message size
network.py    starts them on all hosts; pure functions over what they measured → findings
command.py    the command: table or JSON, exit code
"""
