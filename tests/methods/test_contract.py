"""Contract tests of all registered methods (`fedjax_pcdd.testing`): a new method is tested the day it is registered.

Methods that exchange logits: test_contract_public.py.
"""

import itertools
from functools import partial

import hooks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from chex import assert_trees_all_close
from flax import struct
from participants import NORMED, images

from fedjax_pcdd import methods, models, testing
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.methods.method import Facts, Local, Setting
from fedjax_pcdd.models.classifier import feature_dim, initialise
from fedjax_pcdd.models.pair import Pair

# Hyper-parameters that reduce a method to FedAvg; None, with the reason, where FedAvg is no special case of it.
REDUCES = {
    "fedavg": {},
    "fedprox": {"mu": 0.0},
    "fedgen": {"alpha": 0.0, "beta_kl": 0.0},
    "fedrl": {"mu": 0.0},
    "fedproc": {"mu": 0.0},
    "fedmr": {"mu1": 0.0, "mu2": 0.0},
    "fedgela": {"classifier": "learned", "phi": "none", "layers": 0},
    "moon": {"mu": 0.0},
    "fedproto": None,  # models are never aggregated
    "fednova": None,  # only where all clients make equally many steps, see its tests
    "feddyn": None,  # uniform weights, see its tests
    "feddc": None,  # drifts are added whatever the coefficients
    "scaffold": None,  # only in the first round, see its tests
    "solo": None,  # nothing is aggregated
    "fedrs": {"alpha": 1.0, "bias": True},
    "fedlc": {"tau": 0.0},
    "fedvls": {"lam": 0.0, "omega": 0.0, "calibrated": False},
    "fedntd": {"beta_ntd": 0.0},
    "fedlmd": {"beta_lmd": 0.0},
    "feddecorr": {"beta_dec": 0.0},
    "feduv": {"lam": 0.0, "mu": 0.0},
    "fedetf": None,  # another classifier
    "fedloge": None,  # the body never learns from a trained head
    "fedavgm": {"server_momentum": 0.0},
    "fedadam": None,  # a step of its own length, see its tests
    "fedyogi": None,
    "fedadagrad": None,
    "fedexp": {"epsilon": 1e30},
    "fedsam": {"rho": 0.0},
    "mofedsam": {"rho": 0.0, "alpha": 1.0},
    "fedlesam": {"rho": 0.0},
    "fedsmoo": None,  # uniform weights, see its tests
    "fedgf": {"rho": 0.0, "threshold": float("inf")},
    "fedcm": {"alpha": 1.0},
    "fedrep": None,  # the head is never shared
    "fedbabu": None,  # the head is never trained
    "fedrod": {"prior_power": 0.0},
    "fedper": None,  # the last layers are never shared, see its tests
    "lgfedavg": None,  # the body is never shared, see its tests
    "ditto": {},  # the global model, whatever the personal ones do
    "apfl": {},
    "fedtgp": None,  # models are never aggregated
    "ccvr": None,  # its last round trains nothing, see its tests
    "fml": None,  # private models stay, see its tests
}
# Sizes below the defaults, which are too large for a test: FedTGP's 100 server epochs magnify float32's rounding.
SMALLER = {"fml": {"meme": "mlp"}, "fedtgp": {"server_epochs": 10}}

NAMES = [name for name, method in METHODS.items() if not method().traits().needs_public]
QUICK = ("fedavg", "fedmr", "scaffold")


def simulation(name, **options):
    return toy.simulation(name, **SMALLER.get(name, {}), **options)


SENSITIVE = ("feddecorr",)  # features of tiny spread, standardised, magnify float32's rounding: compared in float64
COMPILING_MORE = (
    testing.blocks_do_not_change_results,
    testing.client_state_on_the_host_does_not_change_results,
    testing.padding_does_not_change_results,
    testing.batches_of_summarise_do_not_change_results,
)


def contract_cases(claims, methods):
    """A case for each claim and method; those that compile more programs are `thorough`, but for a few methods."""
    for claim, name in itertools.product(claims, methods):
        marks = pytest.mark.thorough if claim in COMPILING_MORE and name not in QUICK else ()
        yield pytest.param(claim, name, marks=marks, id=f"{claim.__name__}-{name}")


@pytest.mark.parametrize(("claim", "name"), [*contract_cases(testing.CLAIMS, NAMES)])
def test_every_method_keeps_the_contract(claim, name, request):
    if claim in testing.ROUNDED and name in SENSITIVE:
        request.getfixturevalue("x64")
        claim(partial(simulation, name, dtype=jnp.float64))
    else:
        claim(partial(simulation, name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_a_lane_for_every_client_does_not_change_results(name):
    assert_trees_all_close(
        toy.train(simulation(name, lanes=3)), toy.train(simulation(name, lanes=1)), rtol=1e-5, atol=1e-5
    )


ALL_CLIENTS = 5
SHAPES = [(3, 1), (3, 2), (3, 3), (ALL_CLIENTS, 1), (ALL_CLIENTS, 2), (ALL_CLIENTS, ALL_CLIENTS)]  # (lanes, block)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_lanes_and_blocks_change_results_by_rounding_alone(name, x64):
    def outcome(lanes, block):
        simulated = simulation(name, cohort=ALL_CLIENTS, lanes=lanes, block=block, dtype=jnp.float64)
        state, report = toy.train(simulated)
        return state, report, simulated.evaluate(state, personal=True)

    expected = outcome(1, 1)
    for lanes, block in SHAPES:
        assert_trees_all_close(outcome(lanes, block), expected, rtol=1e-10, atol=1e-10)


# Methods with terms or sums of their own over a batch, with the options that switch on most of them.
WITH_BATCH_TERMS = [
    ("fedavg", {}),
    ("fedavg+prototypes", {}),
    ("fedproc", {"prototype_features": "last_epoch"}),
    ("fedproto", {}),
    ("fedtgp", {}),
    ("fedmr", {"form": "frobenius", "prototype_mode": "train"}),
    ("fedmr", {"prototypes": "onehot", "lite": 100, "mu2": 1.0}),
    ("fedgela", {}),
    ("moon", {}),
    ("fedlc", {"form": "pairwise"}),
    ("fedvls", {}),
    ("fedntd", {"teacher": "train"}),
    ("fedlmd", {}),
    ("feddecorr", {}),
    ("feduv", {}),
    ("fedetf", {}),
    ("fedloge", {}),
    ("fedrl", {"distance": "batch_norm", "received_mode": "train"}),
    ("fedrod", {"personal_logits": "alone"}),
    ("apfl", {"mix": "logits"}),
    ("ditto", {"personal_epochs": 1}),
    ("scaffold", {"control": "I"}),
    ("ccvr", {"covariance": "diagonal"}),
    ("fml", {}),
    ("fccl", {}),
]


def padding_cases():
    """A case for each of these, and slow ones for all others but FedGen, whose noise has the size of the batch."""
    others = [name for name in NAMES if name not in ("fedgen", *dict(WITH_BATCH_TERMS))]
    return [*WITH_BATCH_TERMS, *(pytest.param(name, {}, marks=pytest.mark.slow) for name in others)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "hyper"), padding_cases())
def test_padding_does_not_change_results(name, hyper, x64):
    model_options = {"num_classes": toy.CLASSES, "image_shape": (5, 5, 1), "param_dtype": jnp.float64}
    model = models.build("mlp", **model_options).clone(feature_norm=True)
    method = methods.get(name)(**SMALLER.get(name, {}), **hyper)

    def outcome(size):
        options = {"cohort": ALL_CLIENTS, "batch_size": size, "last_batch": "keep", "lanes": 1, "dtype": jnp.float64}
        return toy.train(toy.simulation(method=method, model=model, **options), (0, 1))

    assert_trees_all_close(outcome(max(toy.SIZES)), outcome(max(toy.SIZES) + 10), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    ["fedavg", "fednova", "scaffold", "feddyn", "feddc", "fedsmoo", "fedcm", "mofedsam", "fedgf", "fedlesam", "fedexp"],
)
def test_running_statistics_of_the_server_are_the_mean_of_the_clients(name):
    method, sizes, statistics = METHODS[name](), (1, 3), np.array([[1.0, 2.0], [5.0, 8.0]])
    server, clients = hooks.start(method, np.zeros(1), sizes, batch_stats=np.zeros(2))
    messages = []
    for k, client in enumerate(clients):
        client_context = hooks.context(method, server, client, sizes=sizes, k=k)
        trained = hooks.params(np.array([1.0 + k]), batch_stats=jnp.asarray(statistics[k]))
        messages.append(method.upload({**client_context.start, **trained}, (), client_context)[1])
    weights = [float(method.weight(hooks.facts(sizes, k))) for k in range(2)]
    after = hooks.aggregate(method, server, messages, weights, clients=2)
    expected = np.average(statistics, axis=0, weights=weights)
    np.testing.assert_allclose(after.variables["batch_stats"], expected, 1e-6)


PREDICTING = [name for name, method in METHODS.items() if method.logits is not Method.logits]


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        *((name, {}) for name in PREDICTING if name != "fedgela"),
        ("fedgela", {"normalise": "batch"}),
        ("apfl", {"mix": "logits"}),
    ],
)
def test_predictions_are_those_of_running_statistics(name, hyper):
    """So they do not depend on the other images of a batch."""
    method, key, counts = METHODS[name](**hyper), jax.random.key(0), jnp.ones((ALL_CLIENTS, toy.CLASSES))
    shape = toy.federation().image_shape
    meme = models.build("mlp", num_classes=toy.CLASSES, image_shape=shape).clone(feature_norm=True)
    model = Pair(NORMED, meme) if name == "fml" else method.build(NORMED)
    setting = Setting(toy.CLASSES, feature_dim(model, shape), ALL_CLIENTS, 3, 2, 8, True)
    method, _ = method.configure(setting, Local())
    initial = initialise(model, key, shape)
    server = method.init_server(setting, initial, counts, key)
    facts = Facts(jnp.int32(0), counts[0], counts[0].sum(), counts)
    client = method.init_client(setting, server._replace(variables=initial), facts, key)
    personal = method.personal_variables(server, client)
    for scope, variables in (
        ("generic", method.generic_variables(server)), ("personal", personal), ("local", personal),
    ):  # fmt: skip
        together, *apart = (
            method.logits(model, variables, x, server, client, facts, scope=scope)
            for x in (images(8), images(8)[:3], images(8)[3:])
        )
        assert_trees_all_close(together, jnp.concatenate(apart), rtol=1e-4, atol=1e-5)


def test_every_method_says_whether_it_reduces_to_fedavg():
    assert set(REDUCES) == set(NAMES)


@pytest.mark.parametrize("name", [n for n, hyper in REDUCES.items() if hyper is not None])
def test_zero_coefficients_reduce_to_fedavg(name):
    plain = Biasless() if name == "fedgela" else Method()  # its learned classifier has no bias
    testing.reduces_to_fedavg(toy.simulation(name, **REDUCES[name]), toy.simulation(method=plain))


@struct.dataclass
class Biasless(Method):
    def build(self, model):
        return model.clone(head_bias=False)
