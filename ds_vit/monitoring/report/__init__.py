"""`report.html`: a run's folder as one offline page.

`record.py` reads the folder, `panels.py` makes panels, `page.py` and `page.html` draw them, next to each other too.
"""
