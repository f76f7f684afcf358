"""FedPer and LG-FedAvg: which parts of a model travel, and which stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import arrays, assert_close, assert_equal, same

import fedjax_pcdd as fp
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fedper import FedPer
from fedjax_pcdd.methods.lgfedavg import LGFedAvg
from fedjax_pcdd.methods.method import Server
from fedjax_pcdd.methods.split_model import divided, united
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import select

PARTS = {"backbone": 1, "feature_norm": 2, "head": 3, "neck": 4}
VARIABLES = {"params": PARTS, "batch_stats": {"backbone": 5, "feature_norm": 6}}
FULL_COHORT = {"cohort": 5}


@pytest.mark.parametrize(
    ("method", "own_layers", "statistics"),
    [
        (FedPer(), {"head"}, set()),
        (FedPer(layers="top"), {"head", "neck", "feature_norm"}, {"feature_norm"}),
        (LGFedAvg(), {"backbone", "neck", "feature_norm"}, {"backbone", "feature_norm"}),
        (LGFedAvg(layers="top"), {"backbone"}, {"backbone"}),
        (FedPer(layers="neck,head"), {"neck", "head"}, set()),
        (FedPer(layers="neck,top"), {"head", "neck", "feature_norm"}, {"feature_norm"}),
    ],
)
def test_running_statistics_stay_where_their_layers_are(method, own_layers, statistics):
    kept, sent = divided(VARIABLES, method.own)
    assert set(kept["params"]) == own_layers
    assert set(kept.get("batch_stats", {})) == statistics
    assert set(sent["params"]) == set(PARTS) - own_layers
    assert united(sent, kept) == VARIABLES


def state_after(name, rounds=(0,), **options):
    return arrays(toy.train(toy.simulation(name, **FULL_COHORT | options), rounds)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "shared", "kept"), [("fedper", "backbone", "head"), ("lgfedavg", "head", "backbone")])
def test_the_first_round_shares_layers_as_fedavg_and_keeps_others_as_solo(name, shared, kept):
    state, fedavg, solo = state_after(name), state_after("fedavg"), state_after("solo")
    assert_close(state.servers.variables["params"][shared], fedavg.servers.variables["params"][shared], 1e-6)
    assert_close(state.clients["params"][kept], solo.clients["params"][kept], 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kept"), [("fedper", "head"), ("lgfedavg", "backbone")])
def test_the_servers_copy_of_the_kept_layers_stays_initial(name, kept):
    start = arrays(toy.simulation(name, **FULL_COHORT).start())
    assert_equal(state_after(name).servers.variables["params"][kept], start.servers.variables["params"][kept])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedper", "lgfedavg"])
def test_an_unselected_client_keeps_its_layers_and_has_the_new_shared_ones(name):
    simulated = toy.simulation(name)
    before = arrays(simulated.start().clients)
    state, _ = simulated.step(simulated.start(), 0)
    unselected = int(np.setdiff1d(np.arange(5), simulated.clients_of(0)[0])[0])
    own_layers = jax.tree.map(lambda x: np.array(x)[unselected], state.clients)
    assert same(own_layers, jax.tree.map(lambda x: x[unselected], before))
    server = jax.tree.map(lambda x: x[0], state.servers)
    personal = simulated.methods.personal_variables(server, own_layers)
    shared = "backbone" if name == "fedper" else "head"
    assert_equal(personal["params"][shared], server.variables["params"][shared])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"client_state": "host"}, {"eval_batch": 7, "block": 2}])
@pytest.mark.parametrize("name", ["fedper", "lgfedavg"])
def test_the_ensemble_predicts_by_the_mean_softmax_of_all_personal_models(name, options):
    simulated = toy.simulation(name, record_ensemble=True, **options)
    state, _ = toy.train(simulated, (0, 1))
    data, server = toy.federation().dataset, jax.tree.map(lambda x: x[0], state.servers)
    x = jnp.asarray(data.x_test, jnp.float32) / 255
    personal_models = [simulated.methods.personal_variables(server, select(arrays(state).clients, k)) for k in range(5)]
    probabilities = [
        jax.nn.softmax(forward(simulated.program.model, variables, x, train=False)[0].logits)
        for variables in personal_models
    ]
    correct = np.argmax(np.mean(probabilities, 0), 1) == data.y_test
    assert np.array(simulated.evaluate(state).further["ensemble"]).sum() == correct.sum()


def test_the_ensembles_sum_has_no_scatter_whose_order_may_vary_on_a_gpu():
    simulated = toy.simulation("lgfedavg", record_ensemble=True)
    rows = np.arange(5)
    arguments = simulated.methods, simulated.start(), simulated.data, rows, rows, np.ones(5, bool)
    assert "scatter" not in simulated.evaluator.softmax_sums.lower(*arguments).as_text()


def test_the_ensemble_is_recorded_only_if_asked():
    simulated = toy.simulation("lgfedavg")
    assert simulated.evaluate(simulated.start()).further == {}


def test_layers_of_the_backbone_are_named_by_their_path():
    tree = {"params": {"backbone": {"fc1": 1, "fc2": 2, "fc20": 3}, "head": 4}, "batch_stats": {"backbone": {"fc2": 5}}}
    for method, own_side in ((FedPer, 0), (LGFedAvg, 1)):
        sides = divided(tree, method(layers="head,backbone/fc2").own)
        assert sides[own_side] == {
            "params": {"backbone": {"fc2": 2}, "head": 4},
            "batch_stats": {"backbone": {"fc2": 5}},
        }
        assert sides[1 - own_side] == {"params": {"backbone": {"fc1": 1, "fc20": 3}}}
        assert united(*sides) == united(*sides[::-1]) == tree


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedper", "lgfedavg"])
def test_with_all_layers_named_fedper_is_solo_and_lgfedavg_is_fedavg(name):
    state = state_after(name, layers="head,backbone/fc1")
    if name == "lgfedavg":
        assert_close(state.servers.variables, state_after("fedavg").servers.variables, 1e-6)
        assert not jax.tree.leaves(state.clients)
    else:
        assert_close(state.clients, state_after("solo").clients, 1e-6)


def test_an_unknown_layer_is_named_in_the_error():
    with pytest.raises(UserError, match=r"names no layer by 'fc3': choose head, top, or of backbone/fc1, head"):
        toy.simulation("fedper", layers="head,fc3").start()


@pytest.mark.thorough
def test_fine_tuning_changes_only_the_own_layers_and_only_if_asked():
    assert not FedPer().traits().fine_tunes
    trained, _ = toy.train(simulated := toy.simulation("fedper", fine_tune_layers=True, **FULL_COHORT))
    tuner = simulated.tuner(2)
    tuned, _ = tuner.step(tuner.storage.copied(trained), 3)
    before, after = arrays(trained), arrays(tuned)
    assert_close(after.servers.variables["params"], before.servers.variables["params"], 1e-6)
    assert not same(after.clients["params"]["head"], before.clients["params"]["head"])


@pytest.mark.thorough
def test_running_statistics_of_base_layers_do_not_change_in_fine_tuning():
    simulated = toy.simulation("fedper", model=toy.narrow_resnet(), epochs=1, fine_tune_layers=True, **FULL_COHORT)
    trained, _ = toy.train(simulated, (0,))
    tuner = simulated.tuner(1)
    before = arrays(trained.servers.variables["batch_stats"])
    tuned, _ = tuner.step(tuner.storage.copied(trained), 1)
    assert_close(arrays(tuned.servers.variables["batch_stats"]), before, 1e-6)


@pytest.mark.thorough
def test_accuracy_of_fine_tuned_layers_is_reported_beside_that_of_training():
    federation = fp.partition(fp.load_dataset("digits"), "pcdd", clients=3, classes_per_client=4)
    options = {"rounds": 2, "local_epochs": 1, "lanes": 1}
    plain, tuned = (
        fp.simulate(federation, FedPer(fine_tune_layers=epochs > 0), fine_tune_epochs=epochs, **options).summary
        for epochs in (0, 2)
    )
    assert "pa_tuned" not in plain
    assert tuned["pa_last"] == plain["pa_last"]
    assert 0 <= tuned["pa_tuned"] <= 1


def test_own_layers_that_start_at_random_are_permuted_separately():
    server = Server({"params": {"head": {"kernel": jnp.arange(20.0), "bias": jnp.arange(20.0)}}})
    head = FedPer(start="random").init_client(None, server, None, jax.random.key(0))["params"]["head"]
    assert (head["kernel"] != head["bias"]).any()


@pytest.mark.thorough
def test_own_layers_may_start_at_random_by_the_key_of_each_client():
    common_state, random_state = (
        toy.simulation("fedper", start=start, **FULL_COHORT).start() for start in ("common", "random")
    )
    other_cohort_state = toy.simulation("fedper", start="random", cohort=2, lanes=1).start()
    kernels = arrays(random_state).clients["params"]["head"]["kernel"]
    common_kernel = arrays(common_state).clients["params"]["head"]["kernel"]
    assert_equal(np.sort(kernels.reshape(5, -1)), np.sort(common_kernel.reshape(5, -1)))
    assert len({kernel.tobytes() for kernel in [*kernels, common_kernel[0]]}) == 6
    assert_equal(arrays(other_cohort_state).clients["params"]["head"]["kernel"], kernels)
    assert_equal(arrays(random_state).servers, arrays(common_state).servers)
