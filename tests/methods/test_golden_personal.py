"""Three whole rounds of the methods with personal parts, through the lanes of a real run, against a float64 program."""

import jax
import numpy as np
import pytest
from golden_vectors import cases
from trajectories import train

RTOL, ATOL = 1e-9, 1e-12

pytestmark = pytest.mark.usefixtures("x64")
each_case = pytest.mark.parametrize("g", cases("personal"))


def row(tree, k):
    return jax.tree.map(lambda x: x[k], tree)


def backbone_size(problem, g):
    """Number of flat parameters that belong to the backbone."""
    return len(g["in_p0"]) - problem.classes * (problem.dim + 1)


def assert_agrees(value, expected):
    np.testing.assert_allclose(value, expected, RTOL, ATOL)


@each_case
def test_bodies_and_personal_heads_of_fedper_agree_with_the_reference(g):
    problem, states = train(g, "fedper", 3)
    for state, body, heads in zip(states, g["out_fedper"], g["out_fedper__heads"], strict=True):
        params = row(state.servers.variables["params"], 0)
        assert_agrees(problem.flatten(params)[: backbone_size(problem, g)], body)
        for k, head in enumerate(heads):
            personal = {**params, **row(state.clients["params"], k)}
            assert_agrees(problem.flatten(personal)[backbone_size(problem, g) :], head)


@each_case
@pytest.mark.parametrize(("setting", "weights"), [("lgfedavg", "method"), ("lgfedavg_uniform", "uniform")])
def test_heads_and_personal_bodies_of_lg_fedavg_agree_with_the_reference(g, setting, weights):
    problem, states = train(g, "lgfedavg", 3, weights=weights)
    for state, head, bodies in zip(states, g[f"out_{setting}"], g[f"out_{setting}__bodies"], strict=True):
        params = row(state.servers.variables["params"], 0)
        assert_agrees(problem.flatten(params)[backbone_size(problem, g) :], head)
        for k, body in enumerate(bodies):
            personal = {**params, **row(state.clients["params"], k)}
            assert_agrees(problem.flatten(personal)[: backbone_size(problem, g)], body)


@each_case
@pytest.mark.parametrize("setting", ["ditto", "ditto_lambda0"])
def test_global_and_personal_models_of_ditto_agree_with_the_reference(g, setting):
    problem, states = train(g, "ditto", 3, lam=float(g["par_lambda"]) if setting == "ditto" else 0.0)
    for state, expected, personal in zip(states, g[f"out_{setting}"], g[f"out_{setting}__personal"], strict=True):
        assert_agrees(problem.flatten(row(state.servers.variables["params"], 0)), expected)
        for k, model in enumerate(personal):
            assert_agrees(problem.flatten(row(state.clients["params"], k)), model)


APFL = {
    "apfl": {},
    "apfl_round": {"adapt": "round"},
    "apfl_step": {"adapt": "step"},
    "apfl_logits": {"mix": "logits"},
    "apfl_code": {"mix": "logits", "adapt": "round"},
}


@each_case
@pytest.mark.parametrize("setting", APFL)
def test_models_and_mixing_weights_of_apfl_agree_with_the_reference(g, setting):
    alpha = {"alpha": float(g["par_alpha"]), "alpha_lr": float(g["par_alpha_lr"])}
    problem, states = train(g, "apfl", 3, **alpha, **APFL[setting])
    outcomes = (g[f"out_{setting}"], g[f"out_{setting}__v"], g[f"out_{setting}__alpha"])
    for state, expected, personal, weights in zip(states, *outcomes, strict=True):
        assert_agrees(problem.flatten(row(state.servers.variables["params"], 0)), expected)
        assert_agrees(state.clients.alpha, weights)
        for k, model in enumerate(personal):
            assert_agrees(problem.flatten(row(state.clients.model["params"], k)), model)
