"""The evaluations of this package: a file for each, whose name is the evaluation's.

A file holds a subclass of ``kvcat.evals.Evaluation``, with options, metrics and facts for the
report, and the task, which makes and scores examples. The first line of its docstring is the line
of ``kvcat eval --help``. Functions import torch, and what needs it, when they run: help texts and
errors about options do not wait for it.
"""
