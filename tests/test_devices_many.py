"""Several devices: the same numbers as on one, each device with its own jobs; eight are seen by one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import eight_devices
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.harness.cli import main
from fedjax_pcdd.simulation import devices, schedule
