"""CCVR: class Gaussians and the retrained classifier against the reference, and the calibration in the last round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import struct
from golden_vectors import cases
from participants import MODEL, arrays, assert_close, context, images, same, variables

from fedjax_pcdd import methods, models
from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.class_gaussians import class_moments, draw_features, gaussians
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods.ccvr import CCVR
from fedjax_pcdd.methods.method import Batch, Local, Message, Method, Setting, Summary, Traits, hyperparameter
from fedjax_pcdd.methods.server_training import train_in_passes
from fedjax_pcdd.methods.wrappers import extended
from fedjax_pcdd.models.classifier import apply_head, feature_dim, forward

RTOL, ATOL = 1e-9, 1e-12
golden = pytest.mark.parametrize("g", cases("ccvr"))
ALL_CLIENTS = {"cohort": 5, "drawn": 20, "calibration_epochs": 2}


def moments(g, rows=slice(None), diagonal=False):
    features, labels = (jnp.asarray(g[name])[rows] for name in ("in_z", "in_y"))
    return class_moments(features, labels, len(g["in_W"]), diagonal=diagonal)


def summed_over_clients(g):
    """The moments of each client, summed over all clients."""
    client_moments = [moments(g, np.flatnonzero(g["in_client"] == k)) for k in np.unique(g["in_client"])]
    return jax.tree.map(lambda *x: sum(x), *client_moments)


@golden
@pytest.mark.usefixtures("x64")
def test_merged_gaussians_agree_with_the_reference(g):
    total = summed_over_clients(g)
    means, covariances = gaussians(total)
    np.testing.assert_array_equal(total.counts, g["out_total"])
    np.testing.assert_array_equal(total.counts > 0, g["out_valid"])
    np.testing.assert_allclose(means, g["out_mean"], RTOL, ATOL)
    np.testing.assert_allclose(covariances, g["out_cov"], RTOL, ATOL)
    _, variances = gaussians(moments(g, diagonal=True))
    np.testing.assert_allclose(variances, np.einsum("cdd->cd", g["out_cov"]), RTOL, ATOL)


@golden
@pytest.mark.usefixtures("x64")
def test_drawn_features_agree_with_the_reference(g):
    features = draw_features(*(jnp.asarray(g[name]) for name in ("out_mean", "out_cov", "in_normal")))
    np.testing.assert_allclose(features, g["out_virtual"], RTOL, ATOL)


@golden
@pytest.mark.usefixtures("x64")
def test_the_retrained_classifier_agrees_with_the_reference(g):
    features, valid = jnp.asarray(g["out_virtual"]), g["out_valid"] > 0
    flat_features, labels = features[valid].reshape(-1, features.shape[2]), jnp.asarray(g["out_labels"])

    def loss(head, index, mask):
        return cross_entropy(apply_head(head, flat_features[index]), labels[index], mask=mask)

    head = {"kernel": jnp.asarray(g["in_W"]).T, "bias": jnp.asarray(g["in_b"])}
    size, lr = g["par_batch_lr"]
    passes = {"epochs": len(g["in_order"]), "size": int(size)}
    head = train_in_passes(head, loss, jnp.asarray(g["in_order"]).__getitem__, len(labels), optax.sgd(lr), **passes)
    np.testing.assert_allclose(head["kernel"].T, g["out_W"], RTOL, ATOL)
    np.testing.assert_allclose(head["bias"], g["out_b"], RTOL, ATOL)


@pytest.mark.thorough
def test_two_clients_in_one_dimension_have_the_variance_of_the_worked_example():
    first_client = class_moments(jnp.asarray([[0.0], [2.0]]), jnp.zeros(2, int), 1, diagonal=False)
    second_client = class_moments(jnp.asarray([[4.0]]), jnp.zeros(1, int), 1, diagonal=False)
    mean, covariance = gaussians(jax.tree.map(jnp.add, first_client, second_client))
    assert (mean.item(), covariance.item()) == (2, 4)


@pytest.mark.thorough
def test_drawn_features_have_the_gaussians_covariance():
    root = np.random.default_rng(0).normal(size=(3, 3))
    covariance = jnp.asarray(root @ root.T, jnp.float32)[None]
    directions = draw_features(jnp.zeros((1, 3)), covariance, jnp.eye(3)[None])[0]
    np.testing.assert_allclose(directions.T @ directions, covariance[0], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_features_of_a_singular_gaussian_are_drawn_in_its_span():
    direction = np.random.default_rng(0).normal(size=8)
    direction = jnp.asarray(direction / np.linalg.norm(direction), jnp.float32)
    normal = jax.random.normal(jax.random.key(0), (1, 50, 8))
    features = draw_features(jnp.zeros((1, 8)), jnp.outer(direction, direction)[None], normal)[0]
    np.testing.assert_allclose(features, jnp.outer(features @ direction, direction), atol=1e-5)


@pytest.mark.thorough
def test_features_drawn_for_a_class_of_one_sample_equal_that_sample():
    one_sample = class_moments(jnp.asarray([[1.0, 2.0]]), jnp.zeros(1, int), 2, diagonal=False)
    features = draw_features(*gaussians(one_sample), jax.random.normal(jax.random.key(0), (2, 5, 2)))
    np.testing.assert_array_equal(features[0], jnp.tile(jnp.asarray([1.0, 2.0]), (5, 1)))


HEAD = {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)}


def toy_moments(order=None):
    rng = np.random.default_rng(1)
    features, labels = jnp.asarray(rng.normal(size=(30, 3)), jnp.float32), jnp.asarray(rng.integers(0, 3, 30))
    return class_moments(features, labels if order is None else order[labels], 4, diagonal=False)


@pytest.mark.thorough
def test_zero_calibration_epochs_leave_the_head_unchanged():
    head = CCVR(calibration_epochs=0).calibrated(HEAD, toy_moments(), jax.random.key(0))
    assert same(head, HEAD)


@pytest.mark.thorough
def test_every_calibration_epoch_shuffles_the_drawn_features_anew():
    def head_after(epochs, head):
        method = CCVR(calibration_epochs=epochs, calibration_lr=0.5, calibration_momentum=0.0, drawn=8)
        return method.replace(calibration_batch=4).calibrated(head, toy_moments(), jax.random.key(0))

    assert not np.allclose(head_after(2, HEAD)["kernel"], head_after(1, head_after(1, HEAD))["kernel"], atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("relu", [False, True])
def test_only_with_relu_negative_features_teach_the_kernel_nothing(relu):
    negative = class_moments(-50 + jax.random.normal(jax.random.key(1), (8, 3)), jnp.arange(8) % 4, 4, diagonal=False)
    head = CCVR(relu=relu).calibrated(HEAD, negative, jax.random.key(0))
    assert same(head["kernel"], HEAD["kernel"]) == relu


@pytest.mark.thorough
def test_calibration_has_the_momentum_asked_for():
    heads = [
        CCVR(calibration_momentum=momentum, calibration_epochs=1, drawn=50).calibrated(
            HEAD, toy_moments(), jax.random.key(0)
        )
        for momentum in (0.0, 0.5, 0.9)
    ]
    first, second, third = (np.abs(head["kernel"] - HEAD["kernel"]).max() for head in heads)
    assert first < 0.8 * second < 0.64 * third


@pytest.mark.thorough
def test_an_absent_class_is_pushed_down_unless_it_is_left_out_of_the_softmax():
    head_of_all, head_of_present = (
        CCVR(softmax=s).calibrated(HEAD, toy_moments(), jax.random.key(0)) for s in ("all", "present")
    )
    assert head_of_all["bias"][3] < -0.01
    assert head_of_present["bias"][3] == 0


def around_last_round(name="ccvr", **options):
    """The simulation, and its states before and after the third and last round."""
    simulated = toy.simulation(name, **options)
    state, _ = toy.train(simulated, (0, 1))
    before = arrays(state)
    state, _ = simulated.step(state, 2)
    return simulated, before, arrays(state)


@pytest.mark.thorough
def test_ccvr_is_fedavg_until_the_last_round_changes_the_calibrated_head_alone():
    _, before, after = around_last_round(**ALL_CLIENTS)
    fedavg, _ = toy.train(toy.simulation("fedavg", cohort=5), (0, 1))
    assert_close(before.servers.variables, arrays(fedavg).servers.variables, 1e-6)
    assert same(before.servers.variables, after.servers.variables)
    assert same(before.servers.head, before.servers.variables["params"]["head"])
    assert not same(before.servers.head, after.servers.head)


@pytest.mark.thorough
def test_the_last_round_calibrates_on_all_clients_features_of_the_global_model():
    simulated, before, after = around_last_round(**ALL_CLIENTS)
    data = simulated.experiments[0].federation.dataset
    server = jax.tree.map(lambda x: jnp.asarray(x[0]), before.servers)
    images = jnp.asarray(data.x_train / 255.0, jnp.float32)
    features = forward(simulated.program.model, server.variables, images, train=False)[0].features
    pooled = class_moments(features, jnp.asarray(data.y_train), toy.CLASSES, diagonal=False)
    key = jax.random.fold_in(jax.random.fold_in(simulated.keys[0], 2), 5)
    method = CCVR(drawn=20, calibration_epochs=2)
    expected = method.calibrated(server.head, pooled, key)
    assert_close(jax.tree.map(lambda x: x[0], after.servers.head), arrays(expected), 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("ga", "name"), [("trained", "ccvr"), ("calibrated", "trained")])
def test_ga_is_that_of_the_chosen_model_and_the_other_is_a_further_model(ga, name):
    _, _, after = around_last_round(ga=ga, **ALL_CLIENTS)
    server = jax.tree.map(lambda x: jnp.asarray(x[0]), after.servers)
    method = CCVR(ga=ga)
    models = [method.generic_variables(server), method.further_models(server)[name]]
    server_heads = {"trained": server.variables["params"]["head"], "calibrated": server.head}
    assert same(models[0]["params"]["head"], server_heads[ga])
    assert same(models[1]["params"]["head"], server_heads["calibrated" if ga == "trained" else "trained"])


@pytest.mark.thorough
def test_ccvr_can_be_combined_with_prototypes():
    simulated = toy.simulation(method=methods.get("ccvr+prototypes")(drawn=20, calibration_epochs=2), cohort=5)
    state = arrays(toy.train(simulated)[0]).servers
    assert state.valid.any()
    assert not same(state.head, state.variables["params"]["head"])


def test_a_server_optimiser_that_would_move_the_calibrated_model_is_refused():
    for name in ("ccvr+avgm", "ccvr+exp"):
        with pytest.raises(UserError, match="has rounds that train nothing, in which a step of the server would go on"):
            methods.get(name)


def test_moments_do_not_depend_on_a_clients_own_running_statistics():
    model = MODEL.clone(feature_norm=True)
    received = variables(model=model)
    own = {**received, "batch_stats": jax.tree.map(lambda x: x + 0.7, received["batch_stats"])}
    setting = Setting(toy.CLASSES, feature_dim(model, (5, 5, 1)), 1, 1, 1, 8, False)
    server = CCVR().init_server(setting, received, None, None)
    last_round = context(model=model, setting=setting, server=server, round=jnp.int32(0))
    batch = Batch(images(), jnp.zeros(8, int), jnp.ones(8))
    moments_of_received, moments_of_own = (CCVR().summarise(v, batch, last_round) for v in (received, own))
    assert moments_of_received.squares.any()
    assert_close(moments_of_own, moments_of_received)


@pytest.mark.thorough
def test_calibration_uses_the_servers_statistics_with_or_without_local_ones():
    options = {"model": toy.narrow_resnet(), "cohort": 5, "epochs": 1, "drawn": 20, "calibration_epochs": 2}
    for local_statistics in (False, True):
        simulated = toy.simulation("ccvr", local_statistics=local_statistics, **options)
        before, _ = toy.train(simulated, (0, 1))
        server = jax.tree.map(lambda x: jnp.array(x[0]), before.servers)
        after, _ = simulated.step(before, 2)
        data, key = toy.federation().dataset, jax.random.fold_in(jax.random.fold_in(simulated.keys[0], 2), 5)
        client_samples = np.concatenate(toy.federation().partition.train)
        images = prepare(toy.PLAIN, data.x_train[client_samples], None, train=False)
        features = forward(simulated.program.model, server.variables, images, train=False)[0].features - server.shift
        pooled = class_moments(features, jnp.asarray(data.y_train[client_samples]), toy.CLASSES, diagonal=False)
        expected = CCVR(drawn=20, calibration_epochs=2).calibrated(server.head, pooled, key, server.shift)
        assert_close(jax.tree.map(lambda x: np.array(x[0]), after.servers.head), arrays(expected), 1e-3)


@pytest.mark.thorough
def test_only_the_last_two_rounds_send_moments_and_the_first_of_them_no_squares():
    simulated, before, _ = around_last_round(**ALL_CLIENTS)
    server, program = jax.tree.map(lambda x: jnp.asarray(x[0]), before.servers), simulated.program
    data = toy.federation().dataset
    batch = Batch(jnp.asarray(data.x_train[:8] / 255.0, jnp.float32), jnp.asarray(data.y_train[:8]), jnp.ones(8))
    nonzero = []
    for r in range(program.setting.rounds):
        context = toy.context(model=program.model, setting=program.setting, server=server, round=jnp.int32(r))
        summary = CCVR().summarise(server.variables, batch, context)
        nonzero.append([bool(jnp.any(moment != 0)) for moment in summary])
    assert nonzero == [[False] * 3] * (len(nonzero) - 2) + [[True, True, False], [True] * 3]


def test_advice_is_given_if_the_cohort_is_not_all_clients():
    simulated = toy.simulation("ccvr", **ALL_CLIENTS)
    assert not any("take part in the last" in sentence for sentence in simulated.advice[0])
    (advice,) = [
        sentence for sentence in toy.simulation("ccvr", cohort=2).advice[0] if "take part in the last" in sentence
    ]
    assert "the 2 of 5 clients" in advice


@struct.dataclass
class Counting(Method):
    """FedAvg whose server counts the samples of its clients in the last rounds."""

    last: int = hyperparameter(1, help="of so many rounds", static=True)

    def traits(self):
        return Traits(summary=Summary(last=self.last))

    def init_server(self, setting, variables, class_counts, key):
        return extended(super().init_server(setting, variables, class_counts, key), seen=jnp.zeros(()))

    def summarise(self, variables, batch, context):
        return batch.mask.sum()  # not 0 before the last round, so a pass made there would change `seen`

    def upload(self, variables, summary, context):
        return (), Message(mean=variables, total=summary)

    def aggregate(self, server, message, weights, context):
        return server._replace(variables=message.mean, seen=message.total)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"lanes": 1}, {"lanes": 3, "block": 3}], ids=["jobs", "blocks"])
@pytest.mark.parametrize("last", [1, 2])
def test_a_summary_of_the_last_rounds_is_computed_in_no_other_round(last, options):
    check_counts(toy.simulation(method=Counting(last), cohort=5, **options), last)


def check_counts(simulated, last):
    state, sample_counts = simulated.start(), []
    for r in range(3):
        state, _ = simulated.step(state, r)
        sample_counts.append(float(state.servers.seen[0]))
    assert sample_counts == [0] * (3 - last) + [sum(toy.SIZES)] * last
    assert simulated.compilations == 1


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 2])
def test_it_is_left_out_of_rounds_in_chunks_too(lanes):
    model = models.build("mlp", num_classes=toy.CLASSES, image_shape=(5, 5, 1))
    experiment = Experiment(toy.federation(), Counting(1), Local(1, 8, lr=0.05), 0)
    execution = Execution(lanes=lanes, stream=4000)
    simulated = Simulation(model, [experiment], pipeline=toy.PLAIN, cohort=5, rounds=3, execution=execution)
    assert simulated.chunked
    check_counts(simulated, last=1)


def setting(**changes):
    return toy.simulation("ccvr", cohort=5).program.setting._replace(**{"rarest_class": 2**20} | changes)


def test_covariances_and_drawn_features_that_do_not_fit_are_refused():
    large = setting(num_classes=1000, feature_dim=2048)
    with pytest.raises(UserError, match="covariance=diagonal"):
        CCVR().configure(large, None)
    with pytest.raises(UserError, match="would draw 1e\\+09 numbers at once: choose a smaller drawn"):
        CCVR(covariance="diagonal").configure(large, None)
    assert not CCVR(covariance="diagonal", drawn=100).configure(large, None)[1]


def test_covariances_that_take_long_are_advised_against():
    advice = CCVR().configure(setting(num_classes=1000, feature_dim=300), None)[1]
    assert [sentence.partition(": ")[2] for sentence in advice] == ["if it is slow, choose `covariance=diagonal`."]


def test_moments_of_half_precision_features_are_counted_in_single_precision():
    features = jnp.ones((301, 2), jnp.bfloat16)
    assert class_moments(features, jnp.zeros(301, int), 2, diagonal=True).counts[0] == 301


def test_a_single_round_is_advised_against():
    assert "`rounds`" in CCVR().configure(setting(rounds=1), None)[1][0]
    assert not CCVR().configure(setting(), None)[1]


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"rarest_class": 0}, {}, "set `softmax=present`"),
        ({"rarest_class": 0}, {"softmax": "present"}, ""),
        (
            {"rarest_class": 7, "feature_dim": 7},
            {},
            "7 samples of a class for 7 features, so its covariance is singular",
        ),
        ({"rarest_class": 7, "feature_dim": 7}, {"covariance": "diagonal"}, ""),
        ({"rarest_class": 8, "feature_dim": 7}, {}, ""),
    ],
)
def test_advice_is_given_on_absent_classes_and_singular_covariances(changes, options, sentence):
    advice = CCVR(**options).configure(setting(**changes), None)[1]
    assert len(advice) == bool(sentence)
    assert sentence in " ".join(advice)


def test_the_setting_counts_the_samples_of_the_rarest_class():
    assert toy.simulation("ccvr").program.setting.rarest_class == 0  # no client has class 3


def test_permuting_classes_permutes_the_gaussians():
    order = jnp.asarray([2, 0, 1, 3])
    plain, permuted = gaussians(toy_moments()), gaussians(toy_moments(order))
    for a, b in zip(plain, permuted, strict=True):
        np.testing.assert_allclose(b[order], a, 1e-5, 1e-6)


def test_float32_keeps_covariances_of_features_far_from_zero():
    rng = np.random.default_rng(3)
    features = (5 + 0.5 * rng.normal(size=(4000, 3))).astype(np.float32)
    moments = class_moments(jnp.asarray(features), jnp.zeros(4000, int), 1, diagonal=False)
    np.testing.assert_allclose(gaussians(moments)[1][0], np.cov(features.T.astype(float)), atol=2e-3)


def error_of_float32(shift, diagonal=False):
    """The largest error of a covariance, relative to the largest entry, of features around 500 with std 0.5."""
    rng = np.random.default_rng(3)
    features = (500 + 0.5 * rng.normal(size=(4000, 3))).astype(np.float32)
    client_moments = [
        class_moments(jnp.asarray(rows), jnp.zeros(len(rows), int), 1, diagonal=diagonal, shift=jnp.float32(shift))
        for rows in np.split(features, 8)
    ]
    means, covariances = gaussians(jax.tree.map(lambda *x: sum(x), *client_moments), jnp.float32(shift))
    np.testing.assert_allclose(means[0], features.mean(0, dtype=float), rtol=1e-6)
    exact = np.cov(features.T.astype(float))
    return np.abs(covariances[0] - (np.diag(exact) if diagonal else exact)).max() / exact.max()


@pytest.mark.parametrize("diagonal", [False, True])
def test_sums_about_a_common_shift_keep_the_digits_that_float32_loses(diagonal):
    assert error_of_float32(0.0, diagonal) > 0.02
    assert error_of_float32(499.0, diagonal) < 1e-4  # the mean feature of another model, near but not equal


@pytest.mark.usefixtures("x64")
def test_a_shift_changes_no_gaussian():
    features, labels = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3))), jnp.arange(20) % 4
    shift = jnp.asarray([1.0, -2.0, 30.0])
    plain = gaussians(class_moments(features, labels, 4, diagonal=False))
    assert_close(plain, gaussians(class_moments(features, labels, 4, diagonal=False, shift=shift), shift), 1e-12)


@pytest.mark.thorough
def test_the_shift_is_the_mean_feature_of_the_round_before_the_last():
    simulated = toy.simulation("ccvr", lr=0.0, **ALL_CLIENTS)
    state = simulated.start()
    shifts = []
    for r in range(3):
        state, _ = simulated.step(state, r)
        shifts.append(np.array(state.servers.shift[0]))
    data = simulated.experiments[0].federation.dataset
    images, server = jnp.asarray(data.x_train / 255.0, jnp.float32), jax.tree.map(lambda x: x[0], state.servers)
    features = forward(simulated.program.model, server.variables, images, train=False)[0].features
    assert not shifts[0].any()
    np.testing.assert_allclose(shifts[1], features.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(shifts[2], shifts[1])
