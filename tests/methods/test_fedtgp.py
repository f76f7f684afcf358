"""FedTGP: the prototypes that the server trains, against the reference, and the models that are drawn to them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from golden_vectors import cases
from participants import SGD, arrays, assert_close, largest_difference, same

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.prototypes import (
    adaptive_margin,
    margin_cross_entropy,
    nearest_gaps,
    nearest_prototype_scores,
    safe_norm,
    squared_distance_to_own,
)
from fedjax_pcdd.methods.fedtgp import FedTGP
from fedjax_pcdd.methods.method import Facts, Local, Message, ServerContext, Setting
from fedjax_pcdd.methods.server_training import train_in_passes
from fedjax_pcdd.models.generator import generate_prototypes, initialise_prototypes

RTOL, ATOL = 1e-9, 1e-12
golden = pytest.mark.parametrize("g", cases("fedtgp"))
FULL_COHORT = {"cohort": 5, "server_epochs": 3}


def network(g, prefix):
    """The server's network from the reference's arrays, whose weights are (out, in)."""
    values = {name: jnp.asarray(g[f"{prefix}{name}"]) for name in ("embedding", "W1", "b1", "W2", "b2")}
    first, second = ({"kernel": values[f"W{i}"].T, "bias": values[f"b{i}"]} for i in (1, 2))
    return {"embedding": values["embedding"], "fc1": first, "fc2": second}


def uploaded(g):
    """The uploaded prototypes, their labels, the centre of each class, and which centres exist."""
    prototypes, labels = jnp.asarray(g["in_protos"]), jnp.asarray(g["in_labels"])
    one_hot = jax.nn.one_hot(labels, len(g["in_embedding"]), dtype=prototypes.dtype)
    counts = one_hot.sum(0)
    return prototypes, labels, one_hot.T @ prototypes / jnp.maximum(counts, 1)[:, None], counts > 0


def assert_agrees(value, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, RTOL, ATOL), value, expected)


@golden
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rule", ["nearest", "farthest"])
def test_margin_loss_and_gradients_agree_with_the_reference(g, rule):
    prototypes, labels, centres, valid = uploaded(g)
    margin = adaptive_margin(centres, valid, g["par_threshold"], rule)
    assert_agrees(margin, g[f"out_margin_{rule}"])
    loss = jax.value_and_grad(lambda p: margin_cross_entropy(prototypes, labels, generate_prototypes(p), margin))
    value, gradients = loss(network(g, "in_"))
    assert_agrees(value, g[f"out_loss_{rule}"])
    assert_agrees(gradients, network(g, f"out_grad_{rule}_"))


def test_embeddings_of_classes_start_with_a_standard_deviation_of_1():
    embedding = initialise_prototypes(jax.random.key(0), 100, 50, 2)["embedding"]
    np.testing.assert_allclose([embedding.mean(), embedding.std()], [0, 1], atol=0.03)


@golden
@pytest.mark.usefixtures("x64")
def test_gaps_and_distances_agree_with_the_reference(g):
    prototypes, _, centres, valid = uploaded(g)
    assert_agrees(nearest_gaps(centres, valid), g["out_gap"])
    targets = generate_prototypes(network(g, "in_"))
    assert_agrees(targets, g["out_global"])
    assert_agrees(safe_norm(prototypes[:, None] - targets), g["out_distance"])


@golden
@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # on a GPU, steps beyond the samples run without effect
@pytest.mark.usefixtures("x64")
def test_trained_prototypes_agree_with_the_reference(g, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    prototypes, labels, *_ = uploaded(g)
    padded = np.concatenate([g["in_order"], np.zeros((len(g["in_order"]), 5), int)], 1)  # the padding comes last

    def loss(params, index, mask):
        targets = generate_prototypes(params)
        return margin_cross_entropy(prototypes[index], labels[index], targets, g["out_margin_nearest"], mask=mask)

    size, lr = g["par_batch_lr"]
    order = jnp.asarray(padded).__getitem__
    options = {"epochs": len(padded), "size": int(size)}
    trained = train_in_passes(network(g, "in_"), loss, order, len(labels), optax.sgd(lr), **options)
    assert_agrees(trained, network(g, "out_trained_"))
    assert_agrees(generate_prototypes(trained), g["out_trained_global"])


@golden
@pytest.mark.usefixtures("x64")
def test_the_clients_loss_and_prediction_agree_with_the_reference(g):
    targets, labels = jnp.asarray(g["out_trained_global"]), jnp.asarray(g["in_y"])
    valid = jnp.ones(len(targets), bool)

    def loss(z):
        distance = squared_distance_to_own(z, labels, targets, valid)
        return cross_entropy(z @ g["in_head_W"].T + g["in_head_b"], labels) + g["par_lambda"] * distance

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(g["in_z"]))
    assert_agrees(value, g["out_client_loss"])
    assert_agrees(gradient, g["out_grad_z"])
    nearest = nearest_prototype_scores(jnp.asarray(g["in_z"]), targets, valid).argmax(1)
    np.testing.assert_array_equal(nearest, g["out_nearest"])


def test_loss_matches_the_worked_example():
    prototype, targets = jnp.zeros((1, 1)), jnp.asarray([[5.0], [1.0]])
    value = margin_cross_entropy(prototype, jnp.zeros(1, int), targets, 2.0)
    np.testing.assert_allclose(value, 6.00248, rtol=1e-6)


@pytest.mark.parametrize("rule", ["nearest", "farthest"])
def test_a_single_class_has_the_largest_margin(rule):
    assert adaptive_margin(jnp.ones((3, 2)), jnp.arange(3) == 1, 7.0, rule) == 7


@pytest.mark.thorough
def test_a_target_equal_to_its_prototype_has_zero_gradient():
    def loss(target):
        return margin_cross_entropy(jnp.ones((1, 2)), jnp.zeros(1, int), jnp.stack([target, jnp.zeros(2)]), 1.0)

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(2)), 0)


@pytest.mark.thorough
def test_only_without_its_term_it_equals_solo():
    without_term, _ = toy.train(toy.simulation("fedtgp", lam=0.0, server_epochs=3))
    solo, _ = toy.train(toy.simulation("solo"))
    assert_close(arrays(without_term.clients), arrays(solo.clients), 1e-6)
    with_term, _ = toy.train(toy.simulation("fedtgp", server_epochs=3))
    assert largest_difference(arrays(with_term.clients), arrays(solo.clients)) > 1e-5


@pytest.mark.thorough
def test_the_first_round_equals_solo_and_begins_the_servers_training():
    simulated = toy.simulation("fedtgp", **FULL_COHORT)
    before = arrays(simulated.start().servers)
    state = arrays(toy.train(simulated, (0,))[0])
    solo = arrays(toy.train(toy.simulation("solo", cohort=5), (0,))[0])
    assert_close(state.clients, solo.clients, 1e-6)
    assert not before.valid.any()
    assert state.servers.valid.all()
    assert not same(before.generator, state.servers.generator)
    assert same(before.variables, state.servers.variables)


@pytest.mark.thorough
def test_each_pass_over_the_uploaded_prototypes_has_its_own_order():
    setting = Setting(4, 6, num_clients=3, rounds=1, epochs=1, batch_size=8, normalised=False)
    context = ServerContext(None, setting, Local(lr=1.0), jnp.zeros((), int), jnp.arange(3), 3, jax.random.key(1))
    prototypes = jax.random.normal(jax.random.key(2), (3, 4, 6))
    message = Message(each=(prototypes, jnp.ones((3, 4), bool)))

    def trained(epochs, server):
        return FedTGP(server_epochs=epochs, server_batch=2).aggregate(server, message, jnp.ones(3) / 3, context)

    start = FedTGP().init_server(setting, (), jnp.ones((3, 4)), jax.random.key(0))
    assert not np.allclose(trained(2, start).prototypes, trained(1, trained(1, start)).prototypes, atol=1e-4)


@pytest.mark.parametrize("most", [2, 2**31])
def test_elsewhere_than_on_a_cpu_the_server_takes_only_steps_that_the_partition_allows(most, monkeypatch):
    setting = Setting(4, 6, 3, rounds=1, epochs=1, batch_size=8, normalised=False, most_classes=most)
    context = ServerContext(None, setting, Local(lr=1.0), 0, jnp.arange(3), 3, jax.random.key(1))
    owned = jnp.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]], bool)
    message = Message(each=(jax.random.normal(jax.random.key(2), (3, 4, 6)), owned))
    server = FedTGP().init_server(setting, (), jnp.ones((3, 4)), jax.random.key(0))

    def train(server):
        return FedTGP(server_epochs=2, server_batch=2).aggregate(server, message, jnp.ones(3) / 3, context)

    expected = train(server)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    traced = jax.make_jaxpr(lambda server: train(server).prototypes)(server)  # two passes, each of some steps
    assert sorted(map(int, re.findall(r"length=(\d+)", str(traced)))) == [2, 3 if most == 2 else 6]
    assert_close(jax.jit(train)(server), expected, 1e-6)


def test_prototypes_of_a_client_without_weight_count_like_any_others():
    setting = Setting(4, 6, num_clients=3, rounds=1, epochs=1, batch_size=8, normalised=False)
    context = ServerContext(None, setting, Local(lr=1.0), jnp.zeros((), int), jnp.arange(3), 3, jax.random.key(1))
    message = Message(each=(jax.random.normal(jax.random.key(2), (3, 4, 6)), jnp.eye(3, 4, dtype=bool)))
    server = FedTGP().init_server(setting, (), jnp.ones((3, 4)), jax.random.key(0))
    weights = jnp.array([[1 / 3] * 3, [0, 0.5, 0.5]])
    equal, without = (FedTGP().aggregate(server, message, w, context) for w in weights)
    assert same(equal, without)
    assert not same(without.prototypes, server.prototypes)


@pytest.mark.thorough
def test_the_server_trains_at_the_clients_learning_rate_unless_it_has_its_own():
    setting = Setting(4, 6, num_clients=3, rounds=1, epochs=1, batch_size=8, normalised=False)
    message = Message(each=(jax.random.normal(jax.random.key(2), (3, 4, 6)), jnp.ones((3, 4), bool)))
    server = FedTGP().init_server(setting, (), jnp.ones((3, 4)), jax.random.key(0))

    def trained(lr, prototype_lr=None):
        method = FedTGP(server_epochs=2, prototype_lr=prototype_lr)
        context = ServerContext(None, setting, Local(lr=lr), 0, jnp.arange(3), 3, jax.random.key(1))
        return method.aggregate(server, message, jnp.ones(3) / 3, context).prototypes

    np.testing.assert_allclose(trained(0.1, 1.0), trained(1.0), 1e-6)
    assert not np.allclose(trained(0.1), trained(1.0), atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("rule", "limit"), [("nearest", 100.0), ("farthest", 100.0), ("nearest", 0.5)])
def test_the_margin_is_that_of_means_over_the_owners_of_each_class(rule, limit):
    setting = Setting(4, 6, num_clients=3, rounds=1, epochs=1, batch_size=8, normalised=False)
    context = ServerContext(None, setting, Local(lr=1.0), 0, jnp.arange(3), 3, jax.random.key(1))
    prototypes = jax.random.normal(jax.random.key(2), (3, 4, 6))
    owned = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]], bool)
    server = FedTGP().init_server(setting, (), jnp.ones((3, 4)), jax.random.key(0))
    one_step = FedTGP(server_epochs=1, server_batch=12, margin=rule, margin_limit=limit)
    after = one_step.aggregate(server, Message(each=(prototypes, owned)), jnp.ones(3) / 3, context)
    centres = jnp.stack([prototypes[owned[:, c], c].mean(0) for c in range(4)])
    margin = adaptive_margin(centres, jnp.ones(4, bool), limit, rule)

    def loss(generator):
        targets = generate_prototypes(generator)
        return margin_cross_entropy(prototypes[owned], jnp.asarray(np.nonzero(owned)[1]), targets, margin)

    expected = jax.tree.map(jnp.subtract, server.generator, jax.grad(loss)(server.generator))
    assert_close(after.generator, expected, 1e-5)


@pytest.mark.thorough
def test_a_round_in_which_nobody_sends_a_prototype_leaves_the_server_as_it_is():
    setting = Setting(4, 6, num_clients=3, rounds=1, epochs=1, batch_size=8, normalised=False)
    context = ServerContext(None, setting, Local(lr=1.0), 0, jnp.arange(3), 0, jax.random.key(1))
    server = FedTGP().init_server(setting, (), jnp.ones((3, 4)), jax.random.key(0))._replace(valid=jnp.ones(4, bool))
    nothing = Message(each=(jnp.zeros((3, 4, 6)), jnp.zeros((3, 4), bool)))
    assert_close(FedTGP(server_epochs=2).aggregate(server, nothing, jnp.zeros(3), context), server)


def scores(**options):
    """Scores of client 3's model on the test images after a round, for PA and for GA."""
    simulated = toy.simulation("fedtgp", **FULL_COHORT, **options)
    state = arrays(toy.train(simulated, (0,))[0])
    server, client = (jax.tree.map(lambda x, k=k: x[k], t) for t, k in ((state.servers, 0), (state.clients, 3)))
    facts = Facts(jnp.int32(3), jnp.asarray([5, 5, 4, 0]), jnp.asarray(14), jnp.zeros((5, 4)))
    images = jnp.asarray(simulated.experiments[0].federation.dataset.x_test / 255.0, jnp.float32)
    method, model = FedTGP(**options), simulated.program.model
    return [
        np.array(method.logits(model, client, images, server, client, facts, scope=scope))
        for scope in ("personal", "local")
    ]


@pytest.mark.thorough
def test_predictions_use_all_classes_unless_limited_to_the_clients_own():
    personal, local = scores()
    assert np.isfinite(personal).all()
    np.testing.assert_array_equal(personal, local)
    personal, local = scores(predict="own")
    assert (personal[:, 3] == -np.inf).all()
    assert np.isfinite(local).all()


@pytest.mark.thorough
def test_predictions_are_the_classifiers_before_prototypes_exist():
    simulated = toy.simulation("fedtgp", **FULL_COHORT)
    state = simulated.start()
    correct = simulated.evaluate(state, personal=True)
    solo = toy.simulation("solo", cohort=5)
    np.testing.assert_array_equal(correct.personal, solo.evaluate(solo.start(), personal=True).personal)


@pytest.mark.thorough
def test_domain_accuracies_use_all_classes():
    correct = []
    for predict in ("prototype", "own"):
        groups = toy.groups("fedtgp", necks=(0,) * 5, predict=predict, server_epochs=3, **SGD)
        correct.append(groups.domain_correct(toy.train(groups, (0,))[0]))
    np.testing.assert_array_equal(*correct)


def groups_of_widths(monkeypatch, name, *widths, **options):
    """Participants with necks of these widths; 0 means no neck, and -1 the same, but as another architecture."""
    plain = toy.architectures(0)[0]
    models = [plain.clone(neck=int(width > 0), neck_width=width or None) for width in widths]
    monkeypatch.setattr(toy, "architectures", lambda *_: models)
    return toy.groups.__wrapped__(name, **SGD, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedtgp", "fedproto"])
def test_server_prototypes_do_not_depend_on_the_architectures(monkeypatch, name):
    outcomes = []
    for widths in ((0, 0, 0, 0, 0), (0, -1, -1, 0, -1)):  # one group, and two whose models are alike
        groups = groups_of_widths(monkeypatch, name, *widths, **({"server_epochs": 3} if name == "fedtgp" else {}))
        assert len(groups.groups) == len(set(widths))
        state, _ = toy.train(groups, (0, 1))
        order_of_participants = jnp.argsort(jnp.concatenate([jnp.asarray(m) for m in groups.members]))
        clients = jax.tree.map(lambda *x, order=order_of_participants: jnp.concatenate(x)[order], *state.clients)
        outcomes.append((clients, state.servers["groups"]))
    (clients, (server,)), (two_group_clients, two_group_servers) = arrays(outcomes)
    for other_server in two_group_servers:
        assert_close(other_server.prototypes, server.prototypes, 1e-5)
    assert_close(two_group_clients, clients, 1e-5)


def test_models_of_several_widths_need_a_common_number_of_features(monkeypatch):
    with pytest.raises(UserError, match="not 6 and 9: set features"):
        groups_of_widths(monkeypatch, "fedtgp", 6, 9, 6, 9, 6)
    groups = groups_of_widths(monkeypatch, "fedtgp", 6, 9, 6, 9, 6, features=4, server_epochs=3)
    assert {group.program.setting.feature_dim for group in groups.groups} == {4}


@pytest.mark.parametrize(("options", "name"), [({"lam": 0.0}, "`lam`"), ({"server_epochs": 0}, "`server_epochs=0`")])
def test_prototypes_that_teach_nothing_are_advised_against(options, name):
    hyper = Local(lr=0.1, momentum=0.9, weight_decay=0.0, clip=jnp.inf)
    assert name in FedTGP(**options).configure(None, hyper)[1][0]
    assert not FedTGP().configure(None, hyper)[1]
