"""What a run leaves to its device: the forms of convolutions and the number of lanes.

Where the packaged table knows nothing of a backend, the forms of the model's convolutions are timed once on the device
and kept for every later run in `fedjax_pcdd/convolutions` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache), a
file for each kind of device and version of JAX. What a run uses stands in its resolved.json, and a resumed run looks
nowhere else, so it computes the same numbers.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fedjax_pcdd.engine.devices import OutOfMemory
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.mesh import devices_of
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.engine.schedule import most_jobs
from fedjax_pcdd.engine.tuning import operations, time_forms
from fedjax_pcdd.errors import Say, UserError, in_one_line
from fedjax_pcdd.models.convolution_table import Choices, Operation, Rule, as_json, from_json, table
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.hosts import told_by_first
from fedjax_pcdd.training.trained_models import parts_of

SECONDS = 20.0
MOST_LANES = 16  # with which ways of lanes are timed; more lanes have the same ways

Timed = dict[Operation, Rule]


class Kept:
    """The timings that the user's cache folder has of one kind of device; what fails there is only said."""

    def __init__(self, device_kind: str, say: Say):
        self._say, name = say, re.sub(r"\W+", "_", device_kind)
        self.path = cache_folder() / "convolutions" / f"{name}-jax{jax.__version__}.json"

    def read(self) -> Timed:
        """What is kept; nothing where the file is damaged."""
        try:
            return dict(from_json(json.loads(self.path.read_text(encoding="utf-8"))).timed)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._say(f"{self.path} cannot be read ({in_one_line(error)}): convolutions are timed anew.")
            return {}

    def write(self, timed: Timed) -> None:
        """Keep these in place of what was, at once or not at all."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(as_json(Choices(tuple(timed.items()))), indent=1), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            self._say(f"{self.path} cannot be written ({error.strerror}): the next run times its convolutions again.")


def cache_folder() -> Path:
    """Of this package and this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_pcdd"


def convolutions_of(
    config: RunConfig, simulation: Simulation | Groups, state: State, noted: Mapping[str, Any] | None, say: Say
) -> Choices | None:
    """Forms of the convolutions of a run: as noted, else as kept or timed now; None for those of the packaged table.

    Args:
      simulation: of one lane.
      state: before the first round.
      noted: what a run that is continued has in its resolved.json, None for a new one; UserError where it is damaged.
      say: told of a cache folder that cannot be used.
    """
    if noted is not None:
        try:
            return from_json(noted["convolutions"]) if noted.get("convolutions") else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = in_one_line(error)
            raise UserError(
                f"resolved.json notes convolutions that do not exist ({reason}): start a new run."
            ) from error
    if config.tune == "off" or table().get(jax.default_backend(), {}).get("shapes"):
        return None
    parts = [part.simulation for part in parts_of(simulation)]
    jobs = most_jobs(len(parts[0].experiments) * parts[0].cohort_size, devices_of(state))
    lanes = min(jobs, MOST_LANES if config.lanes == "auto" else int(config.lanes))
    wanted = list(dict.fromkeys(
        operation for part in parts for operation in operations(
            part.program.model, part.image_shape, part.program.setting.batch_size, lanes,
            part.program.dtype,
        )
    ))  # fmt: skip
    if not wanted:
        return None
    chosen = _timed(wanted, say, quiet=config.quiet) if jax.process_index() == 0 else Choices()
    return from_json(json.loads(told_by_first(json.dumps(as_json(chosen)))))


def _timed(wanted: list[Operation], say: Say, *, quiet: bool) -> Choices:
    """Rules of these operations, those that are not kept timed now."""
    device = jax.local_devices()[0].device_kind
    kept = Kept(device, say)
    known = kept.read()
    missing = [operation for operation in wanted if operation not in known]
    if missing:
        show = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))
        show(f"timing {len(missing)} convolutions on {device}, {SECONDS:.0f} s at most")
        begun = time.perf_counter()
        new = dict(time_forms(missing, begun + SECONDS).timed)
        took = time.perf_counter() - begun
        show(f"timed {len(new)} of {len(missing)} in {took:.1f} s, kept in {kept.path}")
        kept.write(kept.read() | new)  # another run may have written meanwhile
        known |= new
    return Choices(tuple((operation, known[operation]) for operation in wanted if operation in known))


def fewer_lanes(lanes: int, error: OutOfMemory, say: Say) -> int:
    """Half of the lanes of a run that is out of memory, which is said; the error where there is but one."""
    if lanes == 1:
        raise error
    reason, half = error.sentence.partition("): ")[0], lanes // 2
    say(f"{reason}): going on with {half} of {lanes} lanes.")
    return half
