"""Options for benchmarks' protocols: weighted focal loss, local steps in place of epochs, initial weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from in_memory import trained

from fedjax_pcdd.data.sources import load
from fedjax_pcdd.engine.schedule import endless_batches, streams
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy, focal_loss
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.methods.method import Batch, Facts, Local, class_weights
from fedjax_pcdd.models import Outputs
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.initial_weights import started_from
from fedjax_pcdd.training.metrics import History
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.presets import PAPERS
from fedjax_pcdd.training.tasks import setup

SMALL = {"lanes": 1, "rounds": 1, "clients": 3, "beta": 1.0, "batch_size": 50, "fine_tune_epochs": 0}


# The loss


def test_focal_loss_matches_the_worked_example():
    value = focal_loss(jnp.zeros((1, 2)), jnp.array([0]), gamma=2.0, weights=jnp.array([2.0, 1.0]))
    assert float(value) == pytest.approx(0.346574, abs=1e-6)  # p 0.5, alpha 2


def test_focal_loss_without_exponent_and_weights_is_cross_entropy():
    logits, labels = jax.random.normal(jax.random.key(0), (6, 4)), jnp.array([0, 1, 2, 3, 0, 1])
    mask = jnp.array([1, 1, 1, 1, 0, 0])
    np.testing.assert_allclose(
        focal_loss(logits, labels, gamma=0.0, mask=mask), cross_entropy(logits, labels, mask=mask), rtol=1e-6
    )


@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_clients_minimise_the_focal_loss_with_the_exponent_asked_for(gamma):
    outputs = Outputs(None, jax.random.normal(jax.random.key(0), (6, 4)))
    batch = Batch(None, jnp.array([0, 1, 2, 3, 0, 1]), jnp.ones(6))
    context = toy.context(hyper=Local(loss="focal", focal_gamma=gamma))
    expected = focal_loss(outputs.logits, batch.labels, gamma=gamma)
    np.testing.assert_allclose(Method().classification(outputs, batch, context), expected, rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_a_certain_prediction_has_a_finite_gradient(gamma):
    gradient = jax.grad(lambda x: focal_loss(x, jnp.array([0]), gamma=gamma))(jnp.array([[200.0, 0.0]]))
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize(("kind", "expected"), [("pooled", [5 / 4, 5, 0]), ("local", [4 / 3, 4, 0])])
def test_class_weights_are_those_of_all_clients_samples_or_of_the_clients_own(kind, expected):
    counts = jnp.array([[3, 1, 0], [1, 0, 0]])
    facts = Facts(jnp.zeros((), int), counts[0], counts[0].sum(), counts)
    np.testing.assert_allclose(class_weights(facts, kind), expected, rtol=1e-6)
    assert class_weights(facts, "none") is None


def test_methods_with_a_softmax_of_their_own_declare_it():
    with_own_loss = {name for name in METHODS if METHODS[name]().traits().own_loss}
    assert with_own_loss >= {"fedgela", "fedrs", "fedlc", "fedrod", "fml"}
    through_super = {"fedproc", "fedmatch"}  # their loss is a weight times the plain term
    for name, cls in METHODS.items():
        assert (cls.classification is Method.classification) or name in with_own_loss | through_super, name


@pytest.mark.parametrize("method", ["fedlc", "fml"])
def test_methods_with_a_softmax_of_their_own_refuse_class_weights(method):
    with pytest.raises(UserError, match="has a softmax of its own: use loss=ce and class_weights=none"):
        trained(method=method, class_weights="local", **SMALL)


@pytest.mark.thorough
def test_a_run_with_focal_loss_records_the_focal_loss():
    plain, focal = (trained(method="fedprox", loss=loss, local_epochs=1, **SMALL) for loss in ("ce", "focal"))
    (plain_row,), (focal_row,) = plain.history.rows, focal.history.rows
    assert 0 < focal_row["loss"] < plain_row["loss"]


# Local steps


def test_the_order_of_samples_continues_across_rounds():
    options = {"clients": np.array([1]), "steps": 4, "batch": 2, "rule": "keep"}
    rounds = [endless_batches([np.arange(5)], streams(3, 0), round=r, **options)[0] for r in range(3)]
    assert [len(round_batches) for round_batches in rounds] == [4, 4, 4]
    batches = np.concatenate(rounds).reshape(4, 6)  # three batches use up the five samples
    np.testing.assert_array_equal(np.sort(batches), [[-1, 0, 1, 2, 3, 4]] * 4)
    assert len({tuple(row) for row in batches.tolist()}) > 1


def test_rounds_of_local_steps_use_every_sample_before_a_new_order_begins():
    base = toy.simulation()
    local = dataclasses.replace(base.local, batch_size=2, last_batch="keep", local_steps=4)
    experiment = base.experiments[0]._replace(local=local)
    simulated = Simulation(base.program.model, [experiment], pipeline=toy.PLAIN, cohort=5)
    samples = toy.federation().partition.train[2]  # nine samples in five batches
    batches = np.concatenate([simulated.jobs(round)[1][2] for round in range(5)]).reshape(4, 10)
    np.testing.assert_array_equal(np.sort(batches), [[-1, *samples]] * 4)


def test_every_client_takes_the_given_number_of_local_steps():
    simulated = setup([build({"method": "feddc", "local_steps": 3, **SMALL})]).simulation
    assert simulated.plan(0)[1].steps.tolist() == [3, 3, 3]
    assert simulated.program.setting.epochs == 1
    assert simulated.tuner(2).plan(0)[1].steps.max() > 3  # fine-tuning counts epochs


def test_local_epochs_and_local_steps_exclude_each_other():
    assert build({"local_steps": 3})[0].local_epochs is None
    with pytest.raises(UserError, match="local_steps stands in place of epochs"):
        build({"local_steps": 3, "local_epochs": 2})
    with pytest.raises(UserError, match="tells its local epochs apart"):
        setup([build({"method": "fedrep", "local_steps": 3, **SMALL})])
    preset = {"preset": "fedgela/isic2019", "split": "benchmark-natural"}
    assert configure({**preset, "local_epochs": "2"})[0].local_steps is None


# The best round


def test_the_best_round_may_be_chosen_by_balanced_accuracy():
    rows = [{"round": 1, "ga": 0.5, "ga_balanced": 0.2}, {"round": 2, "ga": 0.4, "ga_balanced": 0.3}]
    assert History(rows).best("ga") == (0.5, 1)
    assert History(rows, select_on="test, balanced accuracy").best("ga") == (0.4, 2)
    with pytest.raises(UserError, match="drop it, or select_on=validation"):
        build({"select_by": "balanced", "validation": 0.1, "select_on": "validation"})
    with pytest.raises(UserError, match="drop it, or task"):
        build({"select_by": "balanced", "task": "digits_domains", "local_epochs": None})


# Initial weights


def backbone_arrays(simulated):
    """Backbone arrays of a simulation's first model, by the names that they have in a weights file."""
    leaves = jax.tree_util.tree_leaves_with_path(simulated.initial(0))
    keyed = {tuple(key.key for key in path): np.array(leaf) for path, leaf in leaves}
    return {"/".join([path[0], *path[2:]]): leaf for path, leaf in keyed.items() if path[1] == "backbone"}


def test_a_run_starts_from_the_backbone_of_a_file(tmp_path):
    simulated = toy.simulation()
    weights = {name: leaf + 1 for name, leaf in backbone_arrays(simulated).items()}
    np.savez(tmp_path / "a.npz", **weights)
    loaded_state, fresh_state = started_from(simulated, tmp_path / "a.npz"), simulated.start()
    fresh, loaded = (s.servers.variables["params"] for s in (fresh_state, loaded_state))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x + 1, atol=1e-6), fresh["backbone"], loaded["backbone"])
    jax.tree.map(np.testing.assert_array_equal, fresh["head"], loaded["head"])


@pytest.mark.parametrize("option", ["local_statistics", "local_layers"])
def test_clients_own_running_statistics_start_from_those_of_a_file(tmp_path, option):
    plain = toy.simulation(model=toy.narrow_resnet())
    weights = backbone_arrays(plain) | {
        n: a + 3 for n, a in backbone_arrays(plain).items() if n.startswith("batch_stats")
    }
    np.savez(tmp_path / "a.npz", **weights)
    options = {"pipeline": toy.PLAIN, "cohort": 2, option: True}
    state = started_from(Simulation(plain.program.model, plain.experiments, **options), tmp_path / "a.npz")
    server_statistics, client_statistics = state.servers.variables["batch_stats"], state.statistics["batch_stats"]
    jax.tree.map(
        lambda s, c: np.testing.assert_array_equal(np.broadcast_to(s, c.shape), c), server_statistics, client_statistics
    )
    assert min(np.min(leaf) for leaf in jax.tree.leaves(client_statistics)) >= 3


def test_lg_fedavg_starts_from_a_whole_model_where_the_file_has_the_head(tmp_path):
    simulated = toy.simulation("lgfedavg")
    initial_head = simulated.initial(0)["params"]["head"]
    head_arrays = {f"head:params/{name}": np.array(leaf) + 1 for name, leaf in initial_head.items()}
    np.savez(tmp_path / "a.npz", **backbone_arrays(simulated), **head_arrays)
    loaded_head = started_from(simulated, tmp_path / "a.npz").servers.variables["params"]["head"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y[0], x + 1, atol=1e-6), initial_head, loaded_head)


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda w, name: w.pop(name), "lacks .*, of shape .*: add it"),
    (lambda w, name: w.update({name: np.zeros((1, 1))}), "has the shape"),
    (lambda w, name: w.update({name: w[name] * np.nan}), r"params/.* in .*a\.npz holds numbers that are not finite"),
    (lambda w, name: w.update({name: w[name].astype(str)}), "holds numbers that are not finite"),
    (lambda w, name: w.update({"params/other": np.zeros(1)}), "has params/other, .* of the last .* head:params/kernel"),
    (lambda w, name: w.update({"head:params/bias": np.zeros(4)}), "lacks head:params/kernel, of shape"),
])  # fmt: skip
def test_a_weights_file_that_does_not_fit_the_model_is_refused(tmp_path, change, sentence):
    simulated = toy.simulation()
    weights = backbone_arrays(simulated)
    change(weights, min(weights))
    np.savez(tmp_path / "a.npz", **weights)
    with pytest.raises(UserError, match=sentence):
        started_from(simulated, tmp_path / "a.npz")


def test_a_weights_file_without_running_statistics_is_refused(tmp_path):
    simulated = toy.simulation(model=toy.narrow_resnet())
    np.savez(tmp_path / "a.npz", **{n: a for n, a in backbone_arrays(simulated).items() if n.startswith("params")})
    with pytest.raises(UserError, match="lacks batch_stats/"):
        started_from(simulated, tmp_path / "a.npz")


def test_weights_of_another_type_are_cast_to_the_models_type(tmp_path):
    simulated = toy.simulation()
    weights = {name: np.arange(leaf.size).reshape(leaf.shape) % 9 for name, leaf in backbone_arrays(simulated).items()}
    np.savez(tmp_path / "a.npz", **weights)
    backbone = started_from(simulated, tmp_path / "a.npz").servers.variables["params"]["backbone"]
    assert {leaf.dtype for leaf in jax.tree.leaves(backbone)} == {np.dtype(np.float32)}
    assert {float(np.max(leaf)) for leaf in jax.tree.leaves(backbone)} == {8}


def test_experiments_that_start_from_one_file_have_heads_of_their_own(tmp_path):
    base = toy.simulation()
    simulated = Simulation(
        base.program.model, [base.experiments[0]._replace(seed=seed) for seed in (0, 1)], pipeline=toy.PLAIN, cohort=2
    )
    np.savez(tmp_path / "a.npz", **backbone_arrays(base))
    heads = started_from(simulated, tmp_path / "a.npz").servers.variables["params"]["head"]["kernel"]
    for e in range(2):
        np.testing.assert_array_equal(heads[e], simulated.initial(e)["params"]["head"]["kernel"])
    assert np.any(heads[0] != heads[1])


@pytest.mark.parametrize("simulated", [lambda: toy.simulation("solo"), lambda: toy.groups("solo")])
def test_clients_with_models_of_their_own_refuse_a_weights_file(tmp_path, simulated):
    with pytest.raises(UserError, match="drop it where clients have models of their own"):
        started_from(simulated(), tmp_path / "a.npz")


def test_a_missing_file_of_initial_weights_is_refused_when_the_run_starts(tmp_path):
    config, method = build({"method": "fedavg", "initial_weights": tmp_path / "a.npz", **SMALL})
    with pytest.raises(UserError, match=r"there is no file .*a\.npz: check the path"):
        setup([(config, method)]).start()


# Presets


@pytest.mark.parametrize("table", ["fedgela/isic2019", "fedmr/isic2019"])
def test_the_split_benchmark_natural_has_the_benchmarks_protocol(table):
    options = {"method": "fedavg", "preset": table, "split": "benchmark-natural"}
    config, _ = configure(options)
    chosen = (config.local_steps, config.rounds, config.loss, config.class_weights, config.select_by, config.batch_size)
    assert chosen == (100, 9, "focal", "pooled", "balanced", 64)
    assert (config.lr, config.momentum, config.weight_decay, config.model) == (0.01, 0, 0, "efficientnet_b0_flamby")


@pytest.mark.parametrize("name", ["isic2019", "hyperkvasir", "odir"])
def test_the_error_of_a_missing_data_file_names_the_file_and_its_arrays(tmp_path, name):
    with pytest.raises(UserError, match=rf"put {name}.npz there, with x_train, y_train, x_test and y_test"):
        load(name, tmp_path)


def test_fedgelas_presets_have_the_protocols_of_its_tables():
    for table in ("table2", "table3", "table4", "table5", "table6", "energy"):
        text = (PAPERS / f"presets/fedgela/{table}.yaml").read_text()
        assert "pa_protocol: best_epoch  # published code" in text
    protocols = {
        name: configure({"preset": "fedgela/table2", "split": "full-iid", "method": name})[0].pa_protocol
        for name in ("fedavg", "fedbabu", "fedgen", "fedrep", "fedproto", "fedrod", "fedgela")
    }
    assert protocols == dict.fromkeys(("fedavg", "fedbabu", "fedgen"), "best_mean") | dict.fromkeys(
        ("fedrep", "fedproto", "fedrod", "fedgela"), "best_epoch"
    )
