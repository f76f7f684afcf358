"""Two whole rounds of the methods for label skew, through the lanes of a real run, against a float64 program."""

import jax
import numpy as np
import pytest
from golden_vectors import cases
from trajectories import train

from fedjax_pcdd.methods.fedloge import FedLoGe

RTOL, ATOL = 1e-9, 1e-11

SETTINGS = {
    "fedavg": ("fedavg", {}),
    "fedvls_code_lambda0.5": ("fedvls", {"lam": 0.5}),
    "fedvls_paper_omega0.05_lambda0.5": ("fedvls", {"lam": 0.5, "form": "paper", "omega": 0.05}),
    "fedntd_tau2_beta1": ("fedntd", {"tau": 2.0}),
    "fedlmd_tau1_beta1": ("fedlmd", {}),
    "fedlmd_tf_tau1_beta1": ("fedlmd", {"teacher_free": True}),
    "feddecorr_0.1": ("feddecorr", {}),
    "feduv_2.5_0.5": ("feduv", {}),
    "fedetf": ("fedetf", {}),
    "fedloge": ("fedloge", {}),
}
pytestmark = pytest.mark.usefixtures("x64")
each_case = pytest.mark.parametrize("g", cases("label_skew_trajectories"))


@each_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_two_rounds_agree_with_the_reference(g, setting):
    name, hyper = SETTINGS[setting]
    problem, states = train(g, name, 3, **hyper)
    for state, expected in zip(states, g[f"out_{setting}"], strict=True):
        params = jax.tree.map(lambda x: x[0], state.servers.variables["params"])
        flat = np.append(problem.flatten(params), params.get("beta", []))
        np.testing.assert_allclose(flat, expected, RTOL, ATOL)


@each_case
def test_personal_heads_of_fedloge_agree_with_the_reference(g):
    _, states = train(g, "fedloge", 3)
    for state, expected in zip(states, g["out_fedloge__heads"], strict=True):
        kernels, biases = state.clients["kernel"], state.clients["bias"]
        flat = np.concatenate([kernels.transpose(0, 2, 1).reshape(len(kernels), -1), biases], axis=1)
        np.testing.assert_allclose(flat, expected, RTOL, ATOL)


@each_case
def test_realigned_heads_of_fedloge_agree_with_the_reference(g):
    _, states = train(g, "fedloge", 3)
    method, last = FedLoGe(), states[-1]
    server = jax.tree.map(lambda x: x[0], last.servers)
    generic = method.generic_variables(server)["params"]["head"]["kernel"]
    np.testing.assert_allclose(generic.T, g["out_fedloge__Wg_realigned"], RTOL, ATOL)
    for k, expected in enumerate(g["out_fedloge__Wl_realigned"]):
        client = jax.tree.map(lambda x, k=k: x[k], last.clients)
        combined = method.personal_variables(server, client)["params"]["head"]["kernel"]
        np.testing.assert_allclose((combined - client["kernel"]).T, expected, RTOL, ATOL)
