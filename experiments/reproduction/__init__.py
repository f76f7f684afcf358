"""Reproducing the papers' tables: a plan of cells, one run and one small file of results a cell, and the page of them.

`plan` reads what to run, `cells` runs one cell, `results` is what is kept of it, `session` works a plan off within a
budget of time; `statistics`, `claims` and `page` write the results down; `command` is the command line.
"""
