"""Reproducing the papers' tables: a plan of cells, one run and one small file of results a cell, and the page of them.

plan.py          what to run, from the YAML files beside it
cells.py         one cell, run or continued; eigenvalues.py adds FedMR's Table 7
results.py       what is kept of a cell
session.py       a plan worked off within a budget of time
sharing.py       which of several processes runs a cell
status.py        how far plans are, in one line
columns.py       results as the columns of the papers' tables
claims.py        which claims of the papers the results bear out (claims.yaml)
claims_json.py   the list of them as JSON
hinges.py        what they hinge on: the same differences under other settings
only_gpu.py      which of them ask for a GPU, for how long
figures.py       their picture for each paper
summary.py       the ten sentences
ambiguities.py   what other readings change (ambiguities.yaml), and their page
results_page.py  the page of results; pages.py writes both
command.py       the command line
"""
