"""Compiles the templates of the report where it is imported: in the server of the ranks, instead of in every rank."""

from ds_vit.monitoring.report.page import templates

for name in templates().list_templates(extensions=["html", "css", "js"]):
    templates().get_template(name)
