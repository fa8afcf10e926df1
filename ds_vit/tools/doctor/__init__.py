"""`ds-vit doctor`: find what would keep a run from starting or slow it down, with the remedy, before the run.

facts.py      what one host reports: plain data, gathered on that host
checks.py     pure functions: all hosts' facts and the network's figures → findings
network.py    the ranks that time messages between hosts
images.py     `--images`: decode a whole data set
command.py    the command: ask the hosts, start the ranks; table or JSON, exit code
"""
