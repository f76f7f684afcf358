"""Fixtures shared by all tests, and a cache of compiled programs shared by all test processes."""

import functools
import gc
import itertools
import os
import sys
import threading
from importlib import metadata
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests compile much and compute little, so XLA does not optimise; `XLA_FLAGS= pytest` compiles as it does for users.
SHIPPED_FLAGS = os.environ.get("XLA_FLAGS", "")
FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):  # later versions have no such flag
    FAST += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FAST)

os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax  # noqa: E402
import pytest  # noqa: E402
import toy  # noqa: E402
from golden_vectors import PRECISIONS  # noqa: E402

# Tracing makes many long-lived objects: a search for garbage among them and the imported modules seldom finds any.
gc.freeze()
gc.set_threshold(50_000, 20, 20)


collect_ignore = ["eight_devices.py", "shares.py"]  # stand-alone programs, each of which needs its own process


def pytest_configure(config):
    """If a process reads a cache entry that another one is still writing, JAX warns and compiles the program itself."""
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


LONG = 4.0  # seconds


def pytest_terminal_summary(terminalreporter):
    """List the tests of the fast suite that take long: they should be marked `thorough`."""
    passed = (report for report in terminalreporter.stats.get("passed", []) if report.when == "call")
    seconds = {r.nodeid: r.duration for r in passed if r.duration > LONG and not {"slow", "thorough"} & set(r.keywords)}
    for name in sorted(seconds, key=lambda name: -seconds[name])[:20]:
        terminalreporter.write_line(f"long for the fast suite: {seconds[name]:.1f} s {name}")


@pytest.fixture
def x64():
    """Run a test in float64, as the golden vectors require."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=PRECISIONS)
def precision(request):
    """Run a test in float64 and in float32."""
    if request.param == "float64":
        request.getfixturevalue("x64")
    return PRECISIONS[request.param]


# JAX makes a context for each program it lowers, a fifth of the cost of a small program; a thread can keep one. The
# function is private: with a version of JAX that lacks it, the tests only take longer.
_lowering = sys.modules.get("jax._src.interpreters.mlir")
_make_context = getattr(_lowering, "make_ir_context", None)
_context_of = functools.cache(lambda _: _make_context and _make_context())
if _make_context:
    vars(_lowering)["make_ir_context"] = lambda: _context_of(threading.get_ident())


def _pieces_of_memory() -> int:
    """Number of this process's memory maps, 0 if unknown; Linux allows 65 530, and compiled programs take some each."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def _forget_all():
    toy.forget()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs(request):
    """Drop simulations and programs once there are many; a file that uses monkeypatch shares none with others."""
    uses_monkeypatch = "monkeypatch" in request.path.read_text().lower()
    if uses_monkeypatch:
        toy.forget()
    yield
    _context_of.cache_clear()
    many = not 0 < _pieces_of_memory() < 5_000  # some 2 GB
    if many:
        _forget_all()
    elif uses_monkeypatch:
        toy.forget()


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Drop them within a long file too: at the limit XLA ends the process, and twenty tests make some 15 000 maps."""
    yield
    if next(_tests) % 20 == 0 and _pieces_of_memory() > 30_000:
        _forget_all()


@pytest.fixture(autouse=True, scope="module")
def _pictures_are_empty(request):
    """Drawing a run takes longer than training it: pictures are drawn only in files with `DRAWS_PICTURES = True`."""
    records = sys.modules.get("fedjax_pcdd.api.records")
    with pytest.MonkeyPatch.context() as patch:
        if records and not getattr(getattr(request.node, "obj", None), "DRAWS_PICTURES", False):
            patch.setattr(records, "heat_map", lambda _, path: path.touch())
            patch.setattr(records, "draw_curves", lambda _, path, *__: path.touch())
        yield
