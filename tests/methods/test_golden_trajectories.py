"""Three whole rounds, through the same lanes as a real run, against an independent float64 program."""

import jax
import numpy as np
import pytest
from golden_vectors import cases
from trajectories import train

RTOL, ATOL = 1e-9, 1e-11

SETTINGS = {
    "fedavg": ("fedavg", {}),
    "fednova": ("fednova", {}),
    "feddyn_alpha0.1": ("feddyn", {"alpha": 0.1}),
    "feddc_alpha0.1": ("feddc", {"alpha": 0.1, "step_normaliser": "steps"}),
    "scaffold_rho0_wd0": ("scaffold", {"momentum": 0.0, "decay": 0.0}),
    "fedprox_mu0.1": ("fedprox", {"mu": 0.1}),
    "fedrl_mu0.5": ("fedrl", {"mu": 0.5}),
    "fedproc_additive_mu0.5_tau0.5": ("fedproc", {"mu": 0.5, "tau": 0.5}),
    "moon_mu1_tau0.5": ("moon", {"mu": 1.0, "tau": 0.5}),
    "fedrs_hard_alpha0.5": ("fedrs", {"alpha": 0.5}),
    "fedlc_tau1": ("fedlc", {"tau": 1.0}),
    "fedbabu": ("fedbabu", {}),
    "fedrod": ("fedrod", {}),
    "fedgela_present_kappa10": ("fedgela", {"ew": 100.0, "layers": 0, "denominator": "present"}),
    "fedgela_all_kappa10": ("fedgela", {"ew": 100.0, "layers": 0, "denominator": "all"}),
    "fedgela_ge_kappa10": ("fedgela", {"ew": 10.0, "scale": "linear", "layers": 0, "phi": "none"}),
    "fedmr_offdiag_local_0.1": ("fedmr", {"mu1": 0.1, "mu2": 0.1}),
    "fedmr_offdiag_all_0.1": ("fedmr", {"mu1": 0.1, "mu2": 0.1, "negatives": "all"}),
    "fedmr_intra_only_0.1": ("fedmr", {"mu1": 0.1, "mu2": 0.0}),
    "fedmr_inter_only_all_0.1": ("fedmr", {"mu1": 0.0, "mu2": 0.1, "negatives": "all"}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
@pytest.mark.parametrize("setting", SETTINGS)
def test_three_rounds_agree_with_the_reference(g, setting):
    name, hyper = SETTINGS[setting]
    problem, states = train(g, name, 3, **hyper)
    for state, expected in zip(states, g[f"out_{setting}"], strict=True):
        params = jax.tree.map(lambda x: x[0], state.servers.variables["params"])
        flat = problem.flatten(params)
        np.testing.assert_allclose(flat, expected[: len(flat)], RTOL, ATOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.startswith("fedmr")])
def test_prototypes_agree_with_the_reference(g, setting):
    name, hyper = SETTINGS[setting]
    _, states = train(g, name, 3, **hyper)
    for state, expected in zip(states, g[f"out_{setting}__protos"], strict=True):
        np.testing.assert_allclose(state.servers.prototypes[0], expected, RTOL, ATOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
def test_intra_only_needs_no_prototypes(g):
    problem, states = train(g, "fedmr", 2, mu1=0.1, terms="intra")
    params = jax.tree.map(lambda x: x[0], states[-1].servers.variables["params"])
    np.testing.assert_allclose(problem.flatten(params), g["out_fedmr_intra_only_0.1"][-1], RTOL, ATOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
def test_solo_clients_agree_with_the_reference(g):
    problem, states = train(g, "solo", 2, everyone=True)
    for k, expected in enumerate(g["out_solo__personal"]):
        params = jax.tree.map(lambda x, k=k: x[k], states[-1].clients["params"])
        np.testing.assert_allclose(problem.flatten(params), expected, RTOL, ATOL)
