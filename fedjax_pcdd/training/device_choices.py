"""Choices that depend on the device: the forms of convolutions and the number of lanes.

If the packaged table has nothing for a backend, the forms of the model's convolutions are timed once on the device and
kept for every later run in `fedjax_pcdd/convolutions` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache), one
file for each kind of device and version of JAX. The forms that a run uses are recorded in its resolved.json, and a
resumed run looks nowhere else, so it computes the same numbers.
"""

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from fedjax_pcdd.data.unpacked import cache_folder
from fedjax_pcdd.engine.devices import OutOfMemory
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.mesh import devices_of
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.engine.schedule import most_jobs
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.engine.tuning import operations, time_forms
from fedjax_pcdd.errors import Say, UserError, in_one_line
from fedjax_pcdd.models.convolution_table import Choices, Operation, Rule, as_json, from_json, table
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.fields import write_text
from fedjax_pcdd.training.hosts import told_by_first
from fedjax_pcdd.training.trained_models import parts_of

SECONDS = 20.0
MOST_LANES = 16  # most lanes that forms are timed with; more lanes use the same forms

Timed = dict[Operation, Rule]


class Kept:
    """The timings of one kind of device in the user's cache folder; failures there are only reported."""

    def __init__(self, device_kind: str, say: Say):
        self._say, name = say, re.sub(r"\W+", "_", device_kind)
        self.path = cache_folder() / "convolutions" / f"{name}-jax{jax.__version__}.json"

    def read(self) -> Timed:
        """The timings that are kept; none if the file is missing or damaged."""
        try:
            return dict(from_json(json.loads(self.path.read_text(encoding="utf-8"))).timed)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._say(f"{self.path} cannot be read ({in_one_line(error)}): convolutions are timed anew.")
            return {}

    def write(self, timed: Timed) -> None:
        """Replace the timings that are kept, atomically."""
        text = json.dumps(as_json(Choices(tuple(timed.items()))), indent=1)
        try:
            write_text(self.path, text, "another XDG_CACHE_HOME")
        except UserError as error:
            self._say(f"timings cannot be written, so the next run times its convolutions again: {error}")


def convolutions_of(
    config: RunConfig, simulation: Simulation | Groups, state: State, noted: Mapping[str, Any] | None, say: Say
) -> Choices | None:
    """Forms of the convolutions of a run: as recorded, else as kept or timed now; None for those of the packaged table.

    Args:
      simulation: with one lane.
      state: before the first round.
      noted: the resolved.json of a run that is resumed, None for a new run; UserError if it is damaged.
      say: called if the cache folder cannot be used.
    """
    if noted is not None:
        try:
            return from_json(noted["convolutions"]) if noted.get("convolutions") else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            sentence = f"resolved.json notes convolutions that do not exist ({in_one_line(error)}): start a new run."
            raise UserError(sentence) from error
    if config.tune == "off" or table().get(jax.default_backend(), {}).get("shapes"):
        return None
    simulations = [part.simulation for part in parts_of(simulation)]
    jobs = most_jobs(len(simulations[0].experiments) * simulations[0].cohort_size, devices_of(state))
    lanes = min(jobs, MOST_LANES if config.lanes == "auto" else int(config.lanes))
    used = [operations(s.program.model, s.image_shape, s.local.batch_size, lanes, s.program.dtype) for s in simulations]
    needed = list(dict.fromkeys(operation for of_one in used for operation in of_one))
    if not needed:
        return None
    chosen = _timed(needed, say, quiet=config.quiet) if jax.process_index() == 0 else Choices()
    return from_json(json.loads(told_by_first(json.dumps(as_json(chosen)))))


def _timed(needed: list[Operation], say: Say, *, quiet: bool) -> Choices:
    """The rules of these operations; those that are not kept are timed now."""
    device = jax.local_devices()[0].device_kind
    cache = Kept(device, say)
    timings = cache.read()
    missing = [operation for operation in needed if operation not in timings]
    if missing:
        show = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))
        show(f"timing {len(missing)} convolutions on {device}, {SECONDS:.0f} s at most")
        start_time = time.perf_counter()
        new_timings = dict(time_forms(missing, start_time + SECONDS).timed)
        seconds = time.perf_counter() - start_time
        show(f"timed {len(new_timings)} of {len(missing)} in {seconds:.1f} s, kept in {cache.path}")
        cache.write(cache.read() | new_timings)  # another run may have written meanwhile
        timings |= new_timings
    return Choices(tuple((operation, timings[operation]) for operation in needed if operation in timings))


def fewer_lanes(lanes: int, error: OutOfMemory, say: Say) -> int:
    """Half of the lanes of a run that is out of memory, which is reported; raises the error if there is only one."""
    if lanes == 1:
        raise error
    reason, half = error.sentence.partition("): ")[0], lanes // 2
    say(f"{reason}): going on with {half} of {lanes} lanes.")
    return half
