"""The choice of a convolution's form: looked up in a table by backend and shape, and always one that fits."""

import math

import pytest

from fedjax_pcdd.models import convolution_table
from fedjax_pcdd.models.convolution_forms import FORMS, Window
from fedjax_pcdd.models.convolution_table import LANES, Rule, default_rule, distance, rule_for, table

ENTRIES = [(backend, shape) for backend, backend_table in table().items() for shape in backend_table["shapes"]]
IDS = [
    f"{backend}-{s['kernel'][0]}-{s['strides'][0]}-{s['inputs']}-{s['outputs']}-{s['image'][0]}"
    for backend, s in ENTRIES
]
entries = pytest.mark.parametrize(("backend", "shape"), ENTRIES, ids=IDS)
MEASURED = {"kernel": [3, 3], "strides": [1, 1], "inputs": 8, "outputs": 16, "image": [16, 16]}


def window(image=16, kernel=3, stride=1, pad=1):
    return Window((image, image), (kernel, kernel), (stride, stride), ((pad, pad), (pad, pad)))


@pytest.fixture
def measured(monkeypatch):
    """Set a table with one shape, and another one four doublings away."""

    def set_table(**operations):
        distant = MEASURED | {"inputs": 32, "outputs": 64, "forward": ["direct", "grouped"]}
        fake_table = {"cpu": {"measured": "here", "shapes": [MEASURED | operations, distant]}}
        monkeypatch.setattr(convolution_table, "table", lambda: fake_table)

    return set_table


@entries
def test_every_entry_names_known_operations_forms_and_lanes(backend, shape):
    operations = shape.keys() - MEASURED.keys()
    assert operations <= FORMS.keys()
    assert all(shape[name][0] in FORMS[name] and shape[name][1] in LANES for name in operations)


@entries
def test_every_entry_differs_from_the_default_rule(backend, shape):
    geometry = Window(tuple(shape["image"]), tuple(shape["kernel"]), tuple(shape["strides"]), ((0, 0), (0, 0)))
    for name in shape.keys() - MEASURED.keys():
        assert Rule(*shape[name]) != default_rule(backend, name, geometry, shape["inputs"], shape["outputs"])


def test_no_shape_is_listed_twice():
    keys = [(backend, *(str(shape[name]) for name in MEASURED)) for backend, shape in ENTRIES]
    assert len(set(keys)) == len(keys)


def test_a_measured_shape_gets_its_entry(measured):
    measured(forward=["gemm", "grouped"])
    assert rule_for("cpu", "forward", window(), 8, 16) == Rule("gemm", "grouped")


def test_an_operation_without_an_entry_gets_the_default_rule(measured):
    measured(forward=["gemm", "grouped"])
    assert rule_for("cpu", "weight_gradient", window(), 8, 16) == default_rule(
        "cpu", "weight_gradient", window(), 8, 16
    )


def test_an_unmeasured_shape_gets_the_entry_of_the_nearest(measured):
    measured(forward=["gemm", "loop"])
    assert rule_for("cpu", "forward", window(image=32), 8, 20) == Rule("gemm", "loop")
    assert rule_for("cpu", "forward", window(), 24, 48) == Rule("direct", "grouped")


@pytest.mark.parametrize("layer", [(window(), 1, 16), (window(image=128), 8, 16), (window(kernel=5), 8, 16)])
def test_a_shape_far_from_all_measured_ones_gets_the_default_rule(measured, layer):
    measured(forward=["gemm", "loop"])
    assert rule_for("cpu", "forward", *layer) == default_rule("cpu", "forward", *layer)


def test_a_form_that_does_not_fit_becomes_direct(measured):
    measured(forward=["blocked", "loop"])
    assert rule_for("cpu", "forward", window(image=17), 8, 16) == Rule("direct", "loop")


def test_a_backend_without_a_table_gets_the_default_rule():
    assert rule_for("tpu", "weight_gradient", window(), 8, 16) == Rule("direct", "grouped")
    assert rule_for("gpu", "forward", window(), 8, 16) == Rule("direct", "grouped")
    assert rule_for("gpu", "weight_gradient", window(), 8, 16) == Rule("direct", "gemm")


def test_the_distance_counts_doublings():
    assert distance(MEASURED, window(image=32), 4, 16) == 2
    assert distance(MEASURED, window(stride=2), 8, 16) == math.inf
