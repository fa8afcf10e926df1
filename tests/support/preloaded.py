"""Imports of every rank, made once in the server of the ranks, which imports this module."""

import PIL.Image

from ds_vit.monitoring.report.page import templates
from ds_vit.tasks.registry import all_tasks

all_tasks()  # 50 modules
PIL.Image.init()  # a module for each of 40 formats
for name in templates().list_templates(extensions=["html", "css", "js"]):
    templates().get_template(name)
