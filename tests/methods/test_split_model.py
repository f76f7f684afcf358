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
everyone = {"cohort": 5}


@pytest.mark.parametrize(
    ("method", "own", "statistics"),
    [
        (FedPer(), {"head"}, set()),
        (FedPer(layers="top"), {"head", "neck", "feature_norm"}, {"feature_norm"}),
        (LGFedAvg(), {"backbone", "neck", "feature_norm"}, {"backbone", "feature_norm"}),
        (LGFedAvg(layers="top"), {"backbone"}, {"backbone"}),
        (FedPer(layers="neck,head"), {"neck", "head"}, set()),
        (FedPer(layers="neck,top"), {"head", "neck", "feature_norm"}, {"feature_norm"}),
    ],
)
def test_running_statistics_stay_where_their_layers_are(method, own, statistics):
    kept, sent = divided(VARIABLES, method.own)
    assert set(kept["params"]) == own
    assert set(kept.get("batch_stats", {})) == statistics
    assert set(sent["params"]) == set(PARTS) - own
    assert united(sent, kept) == VARIABLES


def after(name, rounds=(0,), **options):
    return arrays(toy.train(toy.simulation(name, **everyone | options), rounds)[0])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "shared", "kept"), [("fedper", "backbone", "head"), ("lgfedavg", "head", "backbone")])
def test_from_a_common_start_a_round_averages_as_fedavg_and_keeps_as_solo(name, shared, kept):
    state, fedavg, solo = after(name), after("fedavg"), after("solo")
    assert_close(state.servers.variables["params"][shared], fedavg.servers.variables["params"][shared], 1e-6)
    assert_close(state.clients["params"][kept], solo.clients["params"][kept], 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kept"), [("fedper", "head"), ("lgfedavg", "backbone")])
def test_the_servers_own_parts_stay_the_initial_ones(name, kept):
    start = arrays(toy.simulation(name, **everyone).start())
    assert_equal(after(name).servers.variables["params"][kept], start.servers.variables["params"][kept])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedper", "lgfedavg"])
def test_who_is_not_selected_keeps_its_parts_and_has_the_new_shared_ones(name):
    simulated = toy.simulation(name)
    before = arrays(simulated.start().clients)
    state, _ = simulated.step(simulated.start(), 0)
    absent = int(np.setdiff1d(np.arange(5), simulated.clients_of(0)[0])[0])
    own = jax.tree.map(lambda x: np.array(x)[absent], state.clients)
    assert same(own, jax.tree.map(lambda x: x[absent], before))
    server = jax.tree.map(lambda x: x[0], state.servers)
    personal = simulated.methods.personal_variables(server, own)
    shared = "backbone" if name == "fedper" else "head"
    assert_equal(personal["params"][shared], server.variables["params"][shared])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"client_state": "host"}, {"eval_batch": 7, "block": 2}])
@pytest.mark.parametrize("name", ["fedper", "lgfedavg"])
def test_the_ensemble_answers_with_the_mean_of_all_models_softmax(name, options):
    simulated = toy.simulation(name, record_ensemble=True, **options)
    state, _ = toy.train(simulated, (0, 1))
    data, server = toy.federation().dataset, jax.tree.map(lambda x: x[0], state.servers)
    x = jnp.asarray(data.x_test, jnp.float32) / 255
    own = [simulated.methods.personal_variables(server, select(arrays(state).clients, k)) for k in range(5)]
    shares = [jax.nn.softmax(forward(simulated.program.model, one, x, train=False)[0].logits) for one in own]
    right = np.argmax(np.mean(shares, 0), 1) == data.y_test
    assert np.array(simulated.evaluate(state).further["ensemble"]).sum() == right.sum()


def test_an_ensemble_is_asked_for():
    simulated = toy.simulation("lgfedavg")
    assert simulated.evaluate(simulated.start()).further == {}


def test_layers_of_the_backbone_are_named_by_their_path():
    tree = {"params": {"backbone": {"fc1": 1, "fc2": 2, "fc20": 3}, "head": 4}, "batch_stats": {"backbone": {"fc2": 5}}}
    for method, own in ((FedPer, 0), (LGFedAvg, 1)):
        sides = divided(tree, method(layers="head,backbone/fc2").own)
        assert sides[own] == {"params": {"backbone": {"fc2": 2}, "head": 4}, "batch_stats": {"backbone": {"fc2": 5}}}
        assert sides[1 - own] == {"params": {"backbone": {"fc1": 1, "fc20": 3}}}
        assert united(*sides) == united(*sides[::-1]) == tree


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedper", "lgfedavg"])
def test_with_all_layers_named_fedper_is_solo_and_lgfedavg_is_fedavg(name):
    state = after(name, layers="head,backbone/fc1")
    if name == "lgfedavg":
        assert_close(state.servers.variables, after("fedavg").servers.variables, 1e-6)
        assert not jax.tree.leaves(state.clients)
    else:
        assert_close(state.clients, after("solo").clients, 1e-6)


def test_a_layer_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"names no layer by 'fc3': choose head, top, or of backbone/fc1, head"):
        toy.simulation("fedper", layers="head,fc3").start()


@pytest.mark.thorough
def test_fine_tuning_moves_the_own_layers_alone_and_only_if_asked_for():
    assert not FedPer().traits().fine_tunes
    trained, _ = toy.train(simulated := toy.simulation("fedper", fine_tune_layers=True, **everyone))
    tuner = simulated.tuner(2)
    tuned, _ = tuner.step(tuner.storage.copied(trained), 3)
    before, after = arrays(trained), arrays(tuned)
    assert_close(after.servers.variables["params"], before.servers.variables["params"], 1e-6)
    assert not same(after.clients["params"]["head"], before.clients["params"]["head"])


@pytest.mark.thorough
def test_running_statistics_of_base_layers_stand_still_while_own_layers_are_tuned():
    simulated = toy.simulation("fedper", model=toy.narrow_resnet(), epochs=1, fine_tune_layers=True, **everyone)
    trained, _ = toy.train(simulated, (0,))
    tuner = simulated.tuner(1)
    before = arrays(trained.servers.variables["batch_stats"])
    tuned, _ = tuner.step(tuner.storage.copied(trained), 1)
    assert_close(arrays(tuned.servers.variables["batch_stats"]), before, 1e-6)


@pytest.mark.thorough
def test_fine_tuned_layers_are_measured_beside_those_of_training():
    federation = fp.partition(fp.load_dataset("digits"), "pcdd", clients=3, classes_per_client=4)
    how = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 2}
    plain, tuned = (fp.simulate(federation, FedPer(fine_tune_layers=on), **how).summary for on in (False, True))
    assert "pa_tuned" not in plain
    assert tuned["pa_last"] == plain["pa_last"]
    assert 0 <= tuned["pa_tuned"] <= 1


def test_own_layers_that_start_at_random_have_orders_of_their_own():
    server = Server({"params": {"head": {"kernel": jnp.arange(20.0), "bias": jnp.arange(20.0)}}})
    own = FedPer(start="random").init_client(None, server, None, jax.random.key(0))["params"]["head"]
    assert (own["kernel"] != own["bias"]).any()


@pytest.mark.thorough
def test_own_layers_may_start_at_random_for_each_client_by_its_key():
    common, starts = (toy.simulation("fedper", start=how, **everyone).start() for how in ("common", "random"))
    again = toy.simulation("fedper", start="random", cohort=2, lanes=1).start()
    kernels = arrays(starts).clients["params"]["head"]["kernel"]
    of_all = arrays(common).clients["params"]["head"]["kernel"]
    assert_equal(np.sort(kernels.reshape(5, -1)), np.sort(of_all.reshape(5, -1)))
    assert len({kernel.tobytes() for kernel in [*kernels, of_all[0]]}) == 6
    assert_equal(arrays(again).clients["params"]["head"]["kernel"], kernels)
    assert_equal(arrays(starts).servers, arrays(common).servers)
