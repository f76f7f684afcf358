"""Every method on the same data: the first tables of docs/results.md, one sweep a method, all its seeds together.

    python experiments/all_methods.py --data-dir=DATA                    # all tables; the same command continues
    python experiments/all_methods.py --table=digits --method=fedavg,fedmr
    python experiments/all_methods.py --page                             # docs/results.md from experiments/equal_data

A method runs at its defaults, some also otherwise. A result is experiments/equal_data/TABLE/METHOD.json: accuracies of
every seed, the command and the version, or the sentence with which it failed. What has a result is not run again.
The tuned setting beside the defaults is that of the leaderboard, whose splits have the same names; for digits that of
`fedjax-pcdd leaderboard --plan=experiments/equal_data/digits.yaml`. Any other option goes to the sweeps, as --data-dir.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from fedjax_pcdd.api.leaderboard import read_results
from fedjax_pcdd.errors import nearest
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, between, markdown, over_seeds
from fedjax_pcdd.training.fields import read_text, write_text
from fedjax_pcdd.training.folder import CLAIMS, SUMMARY, failure_of
from reproduction.results import commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "experiments" / "equal_data", ROOT / "docs" / "results.md"
LEADERBOARD = ROOT / "results" / "leaderboard"
BEGIN, END = "<!-- all methods: begin -->\n", "<!-- all methods: end -->\n"

_MNIST = (
    "--dataset=fashion_mnist --train-samples=3000 --test-samples=2000 --rounds=30 --local-epochs=2 --batch-size=32 "
    "--fine-tune-epochs=2 --seed=0:3 --lanes=1"
)
TABLES = {
    "digits": "--dataset=digits --partition=pcdd --classes-per-client=2 --rounds=50 --local-epochs=5 --batch-size=20 "
    "--fine-tune-epochs=5 --seed=0:5 --lanes=1",
    "fashion_mnist-P10C2": f"{_MNIST} --partition=pcdd --classes-per-client=2",
    "fashion_mnist-dir0.1": f"{_MNIST} --partition=dirichlet --beta=0.1",
}
TITLES = {
    "digits": "digits, P10C2, five seeds",
    "fashion_mnist-P10C2": "Fashion-MNIST, P10C2, simple CNN, three seeds",
    "fashion_mnist-dir0.1": "Fashion-MNIST, Dirichlet(0.1), simple CNN, three seeds",
}
NETWORKS = {"digits": "mlp"}  # network of the tuned settings; simple_cnn on the others
# A second setting of a method beside its defaults: of the options left open by papers and rulings, one that trains.
SECOND = {
    "feddyn": "--server-step=none", "feddc": "--server-step=none", "fedmr": "--negatives=all",
    "scaffold": "--momentum=0 --lr=0.02", "fedgela": "--ew=1", "fedgf": "--momentum=0",
    "fedcm": "--momentum=0 --lr=0.1", "mofedsam": "--momentum=0 --lr=0.1", "fedloge": "--ssec-norm=1",
}  # fmt: skip
ROWS = (*METHODS, *(f"{method} {extra}" for method, extra in SECOND.items()))
MEASURES = ("ga_best", "ga_last", "ga_mean_last10", "pa_best", "pa_last")
HEADINGS = (
    *("GA best", "GA last", "GA, mean of last 10"),
    *("PA after fine-tuning, best", "PA after fine-tuning, last", "PA in training, best", "PA in training, last"),
)


def path_of(table: str, row: str) -> Path:
    """The file of a row's result."""
    return RESULTS / table / f"{row.replace(' --', '-').replace('=', '')}.json"


def options(table: str, row: str) -> list[str]:
    """Options of the sweep of one row: the table's, the row's further ones, and those that the method needs."""
    method, *needed = row.split()
    if METHODS[method]().traits().needs_public and table != "digits":
        needed += ["--public=mnist", "--public-samples=1000"]
    if method == "fml":
        needed += ["--meme=mlp" if table == "digits" else "--meme=simple_cnn"]
    return [f"--method={method}", *shlex.split(TABLES[table]), *needed]


def run(table: str, row: str, runs: Path, more: list[str]) -> dict:
    """The result of one sweep, which continues where it stopped."""
    method = row.split()[0]
    folder, command = runs / table / path_of(table, row).stem, ["experiments/sweep.py", *options(table, row)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, *command, f"--sweep-dir={folder.resolve()}", *more]
    process = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{method} on {table} was not run: {process.stderr.strip()}")
    folders = sorted(folder.glob("*-s*"))
    summaries = [json.loads((one / SUMMARY).read_text()) for one in folders if (one / SUMMARY).is_file()]
    failures = {file.stem: failure_of(folder / file.stem) for file in sorted((folder / CLAIMS).glob("*.failed"))}
    if left := [one.name for one in folders if one.name not in failures and not (one / SUMMARY).is_file()]:
        raise SystemExit(f"{left[0]} on {table} was not finished: run the same command again.")
    failed = [f"{name}: {reason}" for name, reason in failures.items()]
    seeds = [{"seed": summary["seed"]} | {name: summary.get(name) for name in MEASURES} for summary in summaries]
    return {
        "command": shlex.join(["python", *command]), "version": commit(), "seeds": seeds, "failed": failed,
    }  # fmt: skip


def table(name: str) -> Table:
    """The results so far, sorted by the mean GA of the last ten rounds."""
    rows, tuned = [], _tuned(name)
    for row in ROWS:
        if path_of(name, row).is_file():
            result = json.loads(path_of(name, row).read_text())
            *ga, best, last = [over_seeds((seed[key] for seed in result["seeds"]), factor=100.0) for key in MEASURES]
            tunes = METHODS[row.split()[0]]().traits().fine_tunes
            cells = [*ga, best, last, Cell(), Cell()] if tunes else [*ga, Cell(), Cell(), best, last]
            failed, all_seeds = len(result["failed"]), len(result["failed"]) + len(result["seeds"])
            reasons = "; ".join(dict.fromkeys(line.partition(": ")[2] for line in result["failed"]))
            note = f"{failed} of {all_seeds} seeds failed: {reasons}" if failed else ""
            tuned_cells = tuned.get(row, (Cell(), Cell())) if tuned else ()
            rows.append(Row(row, (*cells, *tuned_cells, Cell(text=result["version"]), Cell(text=note))))
    rows.sort(key=lambda row: (bool(row.cells[-1].text), -(row.cells[2].mean or 0)))
    tuned_columns = (
        (Column("tuned: GA, mean of last 10", digits=1, best=1), Column("tuned", left=True)) if tuned else ()
    )
    accuracies = (Column(text, digits=1, best=1) for text in HEADINGS)
    columns = (*accuracies, *tuned_columns, Column("version"), Column("", left=True))
    missing = [row for row in ROWS if not path_of(name, row).is_file()]
    remarks = f"`python experiments/sweep.py --method=METHOD {TABLES[name]} --data-dir=DATA`. "
    remarks += f"{len(rows)} of {len(ROWS)} rows" + (f"; not run yet: {', '.join(missing)}." if missing else ".")
    return Table(TITLES[name], columns, tuple(rows), remarks)


def _tuned(name: str) -> dict[str, tuple[Cell, Cell]]:
    """Accuracy and tuned setting of each method that the leaderboard has on this split."""
    network_and_split = NETWORKS.get(name, "simple_cnn"), name
    return {
        entry["method"]: (
            over_seeds((seed.get("ga_mean_last10") for seed in entry["seeds"]), factor=100.0),
            Cell(text=", ".join(f"{key} {value}" for key, value in (entry["chosen"] or {}).items())),
        )
        for entry in read_results(LEADERBOARD) if (entry["network"], entry["split"]) == network_and_split
    }  # fmt: skip


def write_page() -> None:
    """Put the tables between the two marks of docs/results.md."""
    tables = "\n".join(markdown(table(name), escape=str) for name in TABLES if table(name).rows)
    write_text(PAGE, between(read_text(PAGE), (BEGIN, END), tables, str(PAGE)), "another folder")


def main() -> None:
    """Run what has no result, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default=",".join(TABLES), help="of these, in this order")
    parser.add_argument("--method", default=",".join(ROWS), help="rows, in this order")
    parser.add_argument("--runs", type=Path, default=Path("runs/methods"), help="folder of the sweeps")
    parser.add_argument("--page", action="store_true", help="write docs/results.md and end")
    args, sweep_options = parser.parse_known_args()
    if args.page:
        write_page()
        return
    for option, choices in (("table", list(TABLES)), ("method", list(ROWS))):
        for name in vars(args)[option].split(","):
            if name not in choices:
                parser.error(f"--{option} has no '{name}': {nearest(name, choices)}")
    for name in args.table.split(","):
        for method in args.method.split(","):
            path = path_of(name, method)
            if not path.is_file():
                result = run(name, method, args.runs, sweep_options)
                write_text(path, json.dumps(result, indent=1) + "\n", "another folder")
                print(f"{name}: {method}", flush=True)


if __name__ == "__main__":
    main()
