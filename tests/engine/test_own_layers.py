"""Normalisation layers that stay with their clients (--bn=local-layers, FedBN)."""

import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import participants
import pytest
import toy
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict
from golden_vectors import cases
from trajectories import Problem

from fedjax_pcdd import methods, models
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.engine.evaluator import _kept_sums
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import LAYERS
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.feddyn import FedDyn
from fedjax_pcdd.methods.fedlesam import FedLESAM
from fedjax_pcdd.methods.fedprox import FedProx
from fedjax_pcdd.methods.method import Batch, Local, Method, hyperparameter
from fedjax_pcdd.methods.moon import Client
from fedjax_pcdd.models.classifier import Classifier, forward
from fedjax_pcdd.models.layers import BatchNorm
from fedjax_pcdd.testing import leaves
from fedjax_pcdd.training.tracking import Tracker


class Normed(nn.Module):
    """a = relu(scale norm(x W1 + b1) + shift), z = a W2 + b2."""

    hidden: int
    features: int

    @nn.compact
    def __call__(self, x, *, train, mask=None):
        x = nn.Dense(self.hidden, param_dtype=x.dtype, name="first")(x.reshape(len(x), -1))
        x = nn.relu(BatchNorm(dtype=x.dtype, param_dtype=x.dtype, name="norm")(x, train=train, mask=mask))
        return nn.Dense(self.features, param_dtype=x.dtype, name="second")(x)


class NormedProblem(Problem):
    """A golden file in whose parameters scale and shift come between the first and the second layer."""

    def simulation(self, lanes):
        (lr, decay), momentum = self.g["par_lr_wd"], float(self.g["par_momentum"])
        model = Classifier(Normed(self.hidden, self.dim), self.classes, param_dtype=jnp.float64)
        local = Local(self.epochs, self.batch, "keep", "sgd", float(lr), momentum, float(decay))
        types = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        simulation = Simulation(
            model, [Experiment(self.federation, METHODS["fedavg"](), local, seed=0)], pipeline=toy.PLAIN,
            cohort=self.clients, local_layers=True, execution=Execution(lanes=lanes, **types),
        )  # fmt: skip
        images = jnp.asarray(self.x[:, None, None, :])
        simulation.data = simulation.data._replace(train=simulation.data.train._replace(images=images))
        return simulation

    def split(self, flat):
        """The shared parameters, and scale and shift."""
        local = self.g["par_local"] > 0
        return flat[~local], flat[local]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("g", cases("fedbn"))
def test_training_agrees_with_the_reference(g, lanes):
    problem = NormedProblem(g)
    simulation = problem.simulation(lanes)
    shared, own_layers = problem.split(g["in_p0"])
    params = problem.unflatten(shared)
    params["backbone"]["norm"] = dict(zip(("scale", "bias"), np.split(own_layers, 2), strict=True))
    state = simulation.start(
        jax.tree.map(lambda x: jnp.asarray(x)[None], {"params": params, **initial_statistics(problem)})
    )
    for r, row in enumerate(problem.selected):
        plan = problem.plan(simulation, r, np.flatnonzero(row))
        state, _ = simulation.step(state, r, plan)
        server = jax.tree.map(lambda x: x[0], state.servers.variables["params"])
        np.testing.assert_allclose(problem.flatten(server), g["out_fedbn"][r], 1e-9, 1e-12)
        for values, suffix in ((state.statistics[LAYERS], "__norm"), (state.statistics["batch_stats"], "__stats")):
            leaves = flatten_dict(values)
            names = ("scale", "bias") if suffix == "__norm" else ("mean", "var")
            rows = np.concatenate([leaves[path] for name in names for path in leaves if path[-1] == name], axis=1)
            np.testing.assert_allclose(rows, g[f"out_fedbn{suffix}"][r], 1e-9, 1e-12)


def initial_statistics(problem):
    zeros = jnp.zeros(problem.hidden)
    return {"batch_stats": {"backbone": {"norm": {"mean": zeros, "var": zeros + 1}}}}


def perceptron(*, norm=True, backbone=None):
    """A perceptron with batch norm of its features, or with another backbone."""
    plain = models.build("mlp", num_classes=toy.CLASSES, image_shape=(5, 5, 1))
    return plain.clone(feature_norm=norm, **({} if backbone is None else {"backbone": backbone}))


class Grouped(nn.Module):
    """A dense layer followed by group norm."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.GroupNorm(2)(nn.Dense(8)(x.reshape(len(x), -1))))


def simulated(
    name="fedavg", *, model=None, method=None, lanes=1, cohort=3, local_layers=True, last_batch="drop", lrs=(0.05,),
    **options,
):  # fmt: skip
    method = method or METHODS[name]()
    experiments = [Experiment(toy.federation(), method, Local(1, 8, last_batch, "sgd", lr), 0) for lr in lrs]
    simulation_options = toy.options(lanes=lanes, cohort=cohort, local_layers=local_layers, rounds=3, **options)
    model = method.build(perceptron() if model is None else model)
    return toy.shared(Simulation(model, experiments, pipeline=toy.PLAIN, **simulation_options))


def assert_close(actual, expected):
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


@pytest.mark.thorough
def test_layers_of_clients_that_did_not_train_do_not_move():
    simulation = simulated()
    before = leaves(simulation.start().statistics[LAYERS])
    state, _ = simulation.step(simulation.start(), 0)
    changed = [(a != b).reshape(5, -1).any(1) for a, b in zip(leaves(state.statistics[LAYERS]), before, strict=True)]
    np.testing.assert_array_equal(np.flatnonzero(np.any(changed, axis=0)), simulation.clients_of(0)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"lanes": 3, "block": 2}, {"lanes": 2}, {"client_state": "host"}])
def test_lanes_blocks_and_client_state_do_not_change_results(options):
    results = [toy.train(simulated(**changes), (0, 1)) for changes in ({}, options)]
    assert_close(*[(state.servers, state.statistics) for state, _ in results])


@pytest.mark.thorough
def test_local_layers_change_nothing_in_a_model_without_normalisation():
    mlp = perceptron(norm=False)
    states = [toy.train(simulated(model=mlp, local_layers=local_layers), (0, 1))[0] for local_layers in (True, False)]
    for a, b in zip(leaves(states[0]), leaves(states[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert simulated(model=mlp).methods.traits() == METHODS["fedavg"]().traits()


@struct.dataclass
class OwnLayerDistance(Method):
    """FedAvg whose loss includes the distance of the own layers from those of a model in the context."""

    compared: str = hyperparameter("start", help="field of the context", static=True)

    def penalty(self, variables, outputs, batch, context):
        params, other = (flatten_dict(tree["params"]) for tree in (variables, getattr(context, self.compared)))
        distance = sum(jnp.abs(params[path] - other[path]).sum() for path in params if path[-2] == "feature_norm")
        return jax.lax.stop_gradient(distance)


@pytest.mark.thorough
def test_start_has_current_own_layers_and_received_has_the_initial_ones():
    losses = {}
    for compared in ("start", "received"):
        _, report = simulated(method=OwnLayerDistance(compared=compared)).step(simulated().start(), 0)
        losses[compared] = np.array(report.loss)
    _, plain = simulated().step(simulated().start(), 0)
    np.testing.assert_allclose(losses["start"], plain.loss, 1e-6)
    distance = losses["received"] - np.array(plain.loss)
    assert (distance >= 0).all()
    assert distance.max() > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "hyper"), [("fedntd", {}), ("moon", {}), ("fedrl", {"mu": 1.0})])
def test_forward_passes_of_the_received_model_use_its_original_layers(name, hyper):
    method = METHODS[name](**hyper)
    current, original, previous, trained = (participants.variables(seed) for seed in range(4))
    batch = Batch(participants.images(8), jnp.arange(8) % 2, jnp.ones(8))
    client = Client(participants.stacked([previous]), jnp.ones((), int))

    def loss(**fields):
        context = participants.context(client=client, step=jnp.zeros((), int), round=jnp.ones((), int), **fields)
        return method.loss(trained, batch, context)[0]

    np.testing.assert_allclose(loss(start=current, untouched=original), loss(start=original), 1e-6)
    assert abs(loss(start=current) - loss(start=original)) > 1e-4


@pytest.mark.thorough
def test_scale_and_shift_of_group_norm_stay_with_their_client_too():
    state, _ = toy.train(simulated(model=perceptron(norm=False, backbone=Grouped())), (0,))
    assert {path[-1] for path in flatten_dict(state.statistics[LAYERS])} == {"scale", "bias"}
    assert set(state.statistics) == {LAYERS}


@pytest.mark.thorough
def test_accuracies_are_those_of_averaged_parameters_with_own_layers():
    simulation = simulated()
    state, _ = toy.train(simulation, (0, 1))
    counts = simulation.evaluate(state, personal=True)
    federation = toy.federation()
    for k in range(5):
        client_values = {name: jax.tree.map(lambda x, k=k: x[k], tree) for name, tree in state.statistics.items()}
        shared = jax.tree.map(lambda x: x[0], state.servers.variables["params"])
        flat = flatten_dict(shared) | flatten_dict(client_values.pop(LAYERS))
        variables = {"params": unflatten_dict(flat), **client_values}
        correct = predictions(simulation, variables) == federation.dataset.y_test
        assert correct.sum() == np.array(counts.local)[k].sum()
        assert correct[federation.partition.test[k]].sum() == np.array(counts.personal)[k].sum()
    assert counts.generic == ()


def predictions(simulation, variables):
    x = jnp.asarray(toy.federation().dataset.x_test, jnp.float32) / 255
    return np.argmax(forward(simulation.program.model, variables, x, train=False)[0].logits, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"client_state": "host"}, {"method": FedDyn()}, {"weights": "uniform"}])
def test_the_server_average_has_the_mean_of_all_clients_layers(options):
    simulation = simulated(**options)
    state, _ = toy.train(simulation, (0, 1))
    uniform = "weights" in options or "method" in options
    weights = np.ones(5) / 5 if uniform else np.array(toy.SIZES) / np.sum(toy.SIZES)
    means = jax.tree.map(lambda x: jnp.asarray(np.tensordot(weights, np.array(x), 1)), dict(state.statistics))
    server = jax.tree.map(lambda x: x[0], state.servers)
    variables = simulation.experiments[0].method.generic_variables(server)
    layers = flatten_dict(means.pop(LAYERS))
    flat = flatten_dict(variables["params"]) | layers
    correct = predictions(simulation, {"params": unflatten_dict(flat), **means}) == toy.federation().dataset.y_test
    further = simulation.evaluate(state).further
    assert np.array(further["server_average"]).sum() == correct.sum()
    if "cloud" in further:  # this method sends differences, so the server's own layers never trained
        flat |= flatten_dict(jax.tree.map(jnp.asarray, server.variables["params"])) | layers
        cloud = predictions(simulation, {"params": unflatten_dict(flat), **means}) == toy.federation().dataset.y_test
        assert np.array(further["cloud"]).sum() == cloud.sum()


@pytest.mark.thorough
@pytest.mark.parametrize("client_state", ["device", "host"])
def test_layers_of_a_client_without_steps_are_not_in_the_mean(client_state):
    # Client 0 has one sample, a batch 8.
    simulation = simulated(last_batch="strict", weights="uniform", client_state=client_state)
    state, _ = toy.train(simulation, (0,))
    expected = jax.tree.map(lambda x: np.array(x)[1:].mean(0, keepdims=True), dict(state.statistics))
    assert_close(simulation.evaluator.mean_layers(state), expected)


@struct.dataclass
class OnlyLayers(FedProx):
    """FedProx that trains the normalisation layer alone."""

    def trainable(self, params, context):
        return {name: jax.tree.map(lambda _, name=name: name == "feature_norm", part) for name, part in params.items()}


@pytest.mark.thorough
def test_a_proximal_term_covers_the_shared_parameters_alone():
    proximal, free = (toy.train(simulated(method=OnlyLayers(mu=mu)), (0,))[0] for mu in (5.0, 0.0))
    for a, b in zip(leaves(proximal.statistics), leaves(free.statistics), strict=True):
        np.testing.assert_array_equal(a, b)
    shared_proximal, _ = toy.train(simulated(method=OnlyLayers(mu=5.0), local_layers=False), (0,))
    shared_free, _ = toy.train(simulated(method=OnlyLayers(mu=0.0), local_layers=False), (0,))
    assert any(
        (a != b).any() for a, b in zip(leaves(shared_proximal.servers), leaves(shared_free.servers), strict=True)
    )


def shared_and_own(simulation, state):
    """Shared parameters [P], and own layers [K, Q] of a state."""
    shared = flatten_dict(jax.tree.map(lambda x: np.array(x[0]), state.servers.variables["params"]))
    own_layers = flatten_dict(jax.tree.map(np.array, state.statistics[LAYERS]))
    assert set(own_layers) == set(simulation.program.setting.own_layers)
    return [x for path, x in shared.items() if path not in own_layers], list(own_layers.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (FedLESAM(rho=0.3), "fedavg"),  # the first round has no model to look back to
        (FedLESAM(rho=0.3, memory="server"), "fedavg"),
        (METHODS["fedavgm"](server_momentum=0.0), "fedavg"),
        (METHODS["fedexp"](epsilon=1e6), "fedavg"),
    ],
)
def test_what_a_method_keeps_of_earlier_rounds_covers_shared_parameters_only(method, plain):
    """In the first round each of these equals the plain method, whatever the clients' own layers are."""
    started = toy.train(simulated(), (0, 1))[0]
    results = []
    for compared in (method, METHODS[plain]()):
        simulation = simulated(method=compared, cohort=5)
        state = simulation.start(started.servers.variables)._replace(statistics=started.statistics)
        results.append(shared_and_own(simulation, simulation.step(jax.tree.map(jnp.copy, state), 0)[0]))
    assert_close(*results)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "plain"), [("fedcm", "fedavg"), ("fedgf", "fedsam"), ("fedlesam", "fedavg"), ("fedprox+sam", "fedsam")]
)
def test_methods_train_own_layers_with_their_plain_gradients(method, plain):
    """If nothing else trains, each equals the plain method; the mean of one client is that client's to the last bit."""
    states = [
        toy.train(simulated(method=training_own_layers_alone(name), cohort=1), range(8))[0] for name in (method, plain)
    ]
    assert_close(*(state.statistics for state in states))


@pytest.mark.parametrize("control", ["I", "II"])
def test_control_variates_of_own_layers_are_zero(control):
    simulation = simulated(method=METHODS["scaffold"](control=control), cohort=5)
    servers = toy.train(simulation, (0, 1))[0].servers
    controls = flatten_dict(servers.control)
    assert any(np.any(x) for x in controls.values())
    assert all(not np.any(controls[path]) for path in simulation.program.setting.own_layers)


def test_scaffolds_gradient_at_the_received_model_sees_the_own_layers_as_received():
    controls = []
    for lr in (0.05, 0.2):
        simulation = simulated(method=METHODS["scaffold"](control="I"), cohort=5, lrs=(lr,))
        controls.append(simulation.step(simulation.start(), 0)[0].clients)
    assert_close(*controls)  # however far training went from there


@pytest.mark.thorough
def test_the_dual_of_a_perturbation_is_zero_for_own_layers():
    simulation = simulated("fedsmoo", cohort=5)
    state, _ = toy.train(simulation, (0, 1))
    for tree in (state.servers.state, state.clients.state):
        flat = flatten_dict(tree)
        assert not any(np.any(np.array(flat[path])) for path in simulation.program.setting.own_layers)
        assert np.any(np.array(flat["head", "kernel"]))


def training_own_layers_alone(name):
    """A method that trains the normalisation layer alone, with hyper-parameters large enough to show any other term."""

    @struct.dataclass
    class Alone(methods.get(name)):
        trainable = OnlyLayers.trainable

    strong = {"mu": 5.0, "rho": 0.5, "threshold": -1.0}
    return Alone(**{key: value for key, value in strong.items() if key in Alone.__dataclass_fields__})


@pytest.mark.parametrize(
    ("name", "advice"),
    [("solo", "drop it"), ("fedmd", "drop it"), ("fedrep", "use bn=local"), ("ditto", "use bn=local")],
)
def test_methods_whose_only_model_is_not_the_average_are_refused(name, advice):
    with pytest.raises(UserError, match=f"bn=local-layers is for methods .* is not: {advice}"):
        simulated(name)


@pytest.mark.thorough
def test_a_run_can_be_resumed(tmp_path):
    folder, module = tmp_path / "run", tmp_path / "own.py"
    module.write_text(OWN_MODEL)
    options = [f"--model={module}:Normed", "--bn=local-layers", "--rounds=2", "--clients=3", "--partition=iid"]
    options += ["--train-samples=60", "--test-samples=20", "--local-epochs=1", "--batch-size=8", "--lanes=1", "--quiet"]
    assert main(["--method=fedavg", *options, f"--run-dir={folder}"]) == 0
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(folder / "checkpoints" / "2")
    assert main([f"--resume={folder}", "--quiet"]) == 0
    resumed = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert [resumed[name] for name in ("loss", "ga", "pa")] == [last[name] for name in ("loss", "ga", "pa")]
    assert last["ga"] is not None


OWN_MODEL = """
import flax.linen as nn

class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x.reshape(len(x), -1))))
"""


@pytest.mark.thorough
def test_steps_of_a_method_that_runs_the_received_model_are_tracked():
    simulation = simulated("fedntd")
    (seen,) = Tracker(("gradients",), simulation, 0).before(0, simulation.start(), simulation.plan(0))
    assert (seen["gradients"]["norm"] > 0).all()


@pytest.mark.thorough
def test_an_experiment_that_diverges_does_not_reach_the_mean_layers_of_another():
    together = simulated(lrs=(1e30, 0.05))
    state, _ = toy.train(together, (0,))
    layers = [np.array(x) for x in jax.tree.leaves(together.evaluator.mean_layers(state))]
    assert any(np.isnan(x[0]).any() for x in layers)
    alone = simulated()
    state, _ = toy.train(alone, (0,))
    assert_close([x[1:] for x in layers], alone.evaluator.mean_layers(state))


@pytest.mark.thorough
def test_a_method_with_a_second_global_model_is_refused():
    with pytest.raises(UserError, match="only model is the average of all, which CCVR's is not"):
        simulated("ccvr")


def test_the_mean_of_own_layers_is_in_full_precision():
    text = _kept_sums.lower({"w": jnp.ones((2, 3))}, jnp.arange(2), jnp.ones((1, 2))).as_text()
    assert "HIGHEST" in text
    assert "DEFAULT" not in text
