"""Reproducing the papers' tables: a plan of cells, a run and a small file of results for each, and the pages of them.

plan.py          what to run, from the YAML files beside it
cells.py         one cell, run or continued; eigenvalues.py adds FedMR's Table 7
results.py       the result of a cell
session.py       works through a plan within a budget of time
sharing.py       which of several processes runs a cell
status.py        the progress of plans, in one line
columns.py       results as the columns of the papers' tables
claims.py        which claims of the papers the results bear out (claims.yaml)
claims_json.py   the claims as JSON
hinges.py        what the claims hinge on: the same differences under other settings
only_gpu.py      which claims need a GPU, and for how long
figures.py       a picture of the claims of each paper
summary.py       the ten sentences at the top of the page of results
ambiguities.py   what other readings change (ambiguities.yaml), and their page
results_page.py  the page of results; pages.py writes all pages
command.py       the command line
"""
