"""The evaluations of this package: a file for each, whose name is the evaluation's.

A file holds a subclass of ``kvcat.evals.Evaluation``: options, metrics, facts for the report. The
first line of its docstring is the line of ``kvcat eval --help``. How examples are made and scored
is in ``kvcat.evals.NAME``, which ``make_task`` imports, because it needs torch.
"""
