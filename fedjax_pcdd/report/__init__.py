"""Reports over run folders: tables beside the papers' numbers, curves, one HTML page, and paired comparisons.

collect.py     run folders as plain records
grouping.py    which runs are repetitions of one experiment, and which experiments stand side by side
expected.py    the papers' numbers and the corresponding values of a run
targets.py     rounds to FedAvg's accuracy and speed-ups
statistics.py  paired differences, p-values of a family
tables.py      tables, and how they look in the terminal, Markdown, LaTeX and CSV
contents.py    the tables that a report has
standings.py   the leaderboard's results as tables
plots.py       learning curves with bands, as SVG
page.py        report.html
compare.py     paired differences of run folders
"""
