"""FedLoGe: a sparse ETF for the body, two heads beside it, and their realignment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from golden_vectors import cases
from linear_model import context, dense

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods.fedloge import FedLoGe, Server
from fedjax_pcdd.methods.method import Batch, Facts, Setting
from fedjax_pcdd.models.classifier import Outputs

golden = pytest.mark.parametrize("g", cases("fedloge"))


def heads(g):
    return {"head": dense(g["in_Wg"], g["in_bg"]), "personal": dense(g["in_Wl"], g["in_bl"])}


def server_of(g):
    head = {"head": heads(g)["head"]}
    return Server({"params": head}, jnp.asarray(g["out_sparse_200"]))


def logits(g, variables, *, scope="generic", biases="script"):
    counts = jnp.asarray(g["in_counts"])
    facts = Facts(jnp.zeros((), int), counts, counts.sum(), counts[None])
    method = FedLoGe(biases=biases)
    model = context(method, g["in_counts"], features=g["in_f"].shape[1]).model
    return method.logits(model, variables, jnp.asarray(g["in_f"]), server_of(g), (), facts, scope=scope)


@pytest.mark.usefixtures("x64")
@golden
def test_losses_and_gradients_agree_with_the_golden_vectors(g):
    method, server = FedLoGe(), server_of(g)
    client_context = context(method, g["in_counts"], features=g["in_f"].shape[1])._replace(server=server)

    def loss(layers, features):
        batch = Batch(features, jnp.asarray(g["in_y"]), jnp.ones(len(g["in_y"])))
        return method.loss({"params": layers}, batch, client_context)[0]

    value, (gradient, features) = jax.value_and_grad(loss, argnums=(0, 1))(heads(g), jnp.asarray(g["in_f"]))
    np.testing.assert_allclose(value, g["out_loss_backbone"] + g["out_loss_global"] + g["out_loss_local"], 1e-9)
    np.testing.assert_allclose(features, g["out_grad_f"], 1e-9, 1e-12)
    for part, letter in (("head", "g"), ("personal", "l")):
        np.testing.assert_allclose(gradient[part]["kernel"].T, g[f"out_grad_W{letter}"], 1e-9, 1e-12)
        np.testing.assert_allclose(gradient[part]["bias"], g[f"out_grad_b{letter}"], 1e-9, 1e-12)


@pytest.mark.usefixtures("x64")
@golden
def test_generic_model_agrees_with_the_golden_vectors(g):
    variables = FedLoGe(head_norm=float(g["par_target"])).generic_variables(server_of(g))
    np.testing.assert_allclose(variables["params"]["head"]["kernel"].T, g["out_Wg_realigned"], 1e-9)
    generic_logits = logits(g, variables)
    np.testing.assert_allclose(generic_logits, g["out_logits_generic"], 1e-9)
    np.testing.assert_array_equal(jnp.argmax(generic_logits, axis=1), g["out_prediction_generic"])


@pytest.mark.usefixtures("x64")
@golden
def test_models_beside_the_generic_one_are_the_sparse_etf_and_the_plain_head(g):
    models = FedLoGe().further_models(server_of(g))
    np.testing.assert_allclose(logits(g, models["ssec"]), g["out_logits_ssec"], 1e-9)
    np.testing.assert_allclose(logits(g, models["aux"]), g["in_f"] @ g["in_Wg"].T + g["in_bg"], 1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("biases", "name"), [("script", "personal"), ("readme", "personal_readme")])
@golden
def test_personal_logits_agree_with_the_golden_vectors(g, biases, name):
    variables = FedLoGe(biases=biases).personal_variables(server_of(g), heads(g)["personal"])
    personal_logits = logits(g, variables, scope="personal")
    np.testing.assert_allclose(personal_logits, g[f"out_logits_{name}"], 1e-9)
    if biases == "script":
        np.testing.assert_array_equal(jnp.argmax(personal_logits, axis=1), g["out_prediction_personal"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("biases", ["script", "readme"])
@golden
def test_a_client_in_training_is_tested_with_its_joint_head(g, biases):
    method, personal_head = FedLoGe(biases=biases), heads(g)["personal"]
    in_training, between_rounds = (
        method.download(server_of(g), personal_head),
        method.personal_variables(server_of(g), personal_head),
    )
    training_logits, expected = (
        logits(g, variables, scope="personal", biases=biases) for variables in (in_training, between_rounds)
    )
    np.testing.assert_array_equal(training_logits, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("rows", "name"), [("raw", "Wl_realigned"), ("unit", "Wl_realigned_unit")])
@golden
def test_common_rows_take_the_personal_norms(g, rows, name):
    personal = heads(g)["personal"]
    joint_kernel = FedLoGe(rows=rows).personal_variables(server_of(g), personal)["params"]["head"]["kernel"]
    np.testing.assert_allclose((joint_kernel - personal["kernel"]).T, g[f"out_{name}"], 1e-9)


def realigned(method, common, personal):
    """Rows of the generic head, and of the common part of the personal one, from rows [C, D]."""
    zeros = np.zeros(len(common), np.float32)
    server = Server({"params": {"head": dense(np.float32(common), zeros)}}, jnp.zeros(()))
    client = dense(np.float32(personal), zeros)
    joint_kernel = method.personal_variables(server, client)["params"]["head"]["kernel"]
    return method.generic_variables(server)["params"]["head"]["kernel"].T, (joint_kernel - client["kernel"]).T


def test_realignment_has_the_values_of_the_worked_example():
    common, personal = [[3, 4], [0, 1]], [[2, 0], [0, 0.5]]
    generic, raw = realigned(FedLoGe(), common, personal)
    np.testing.assert_allclose(generic, [[1.02, 1.36], [0, 1.7]], rtol=1e-6)
    np.testing.assert_allclose(raw, [[6, 8], [0, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(realigned(FedLoGe(rows="unit"), common, personal)[1], [[1.2, 1.6], [0, 0.5]], rtol=1e-6)


def test_a_row_of_zeros_stays_zero_when_realigned():
    generic, raw = realigned(FedLoGe(rows="unit"), [[0, 0], [0, 1]], [[0, 0], [1, 0]])
    np.testing.assert_array_equal(generic[0], 0)
    np.testing.assert_array_equal(raw[0], 0)


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_of_the_heads_does_not_move_the_body(clip):
    bodies = []
    for method in (FedLoGe(), UntrainedHeads()):
        state, _ = toy.train(toy.simulation("fedloge", method=method, momentum=0.0, clip=clip))
        bodies.append(state.servers.variables["params"]["backbone"])
    jax.tree.map(np.testing.assert_array_equal, *bodies)


@struct.dataclass
class UntrainedHeads(FedLoGe):
    """FedLoGe whose heads learn nothing."""

    def penalty(self, variables, outputs, batch, context):
        return 0.0


@pytest.mark.thorough
def test_a_client_with_one_class_is_right_on_all_of_its_samples():
    simulated = toy.simulation("fedloge")
    state, _ = toy.train(simulated)
    correct = np.array(simulated.evaluate(state, personal=True).personal).sum(1)
    assert correct[0] == simulated.experiments[0].federation.test_sizes[0]  # the client that has class 2 alone


@pytest.mark.thorough
def test_two_further_global_models_are_evaluated_beside_the_generic_one():
    simulated = toy.simulation("fedloge")
    assert set(simulated.evaluate(simulated.start()).further) == {"ssec", "aux"}


@pytest.mark.usefixtures("x64")
@golden
def test_a_frozen_bias_is_added_to_the_sparse_etfs_logits_alone(g):
    bias = jnp.linspace(-1, 1, len(g["in_bg"]))
    server_without_bias, server_with_bias = server_of(g), server_of(g)._replace(bias=bias)
    models = [FedLoGe().further_models(s) for s in (server_without_bias, server_with_bias)]
    np.testing.assert_allclose(logits(g, models[1]["ssec"]), g["out_logits_ssec"] + bias, 1e-9)
    np.testing.assert_array_equal(logits(g, models[1]["aux"]), logits(g, models[0]["aux"]))
    client_context = context(FedLoGe(), g["in_counts"], features=g["in_f"].shape[1])
    f, labels = jnp.asarray(g["in_f"]), jnp.zeros(len(g["in_f"]), int)
    batch = Batch((), labels, jnp.ones(len(f)))
    loss = FedLoGe().classification(Outputs(f, f), batch, client_context._replace(server=server_with_bias))
    np.testing.assert_allclose(loss, cross_entropy(f @ server_with_bias.sparse_etf + bias, labels), 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(("form", "drawn"), [("none", False), ("frozen", True)])
def test_the_bias_of_the_sparse_etf_is_zero_or_random_and_never_trained(form, drawn):
    simulated = toy.simulation("fedloge", ssec_bias=form)
    initial_bias = np.array(simulated.start().servers.bias[0])
    features = simulated.program.setting.feature_dim
    assert initial_bias.shape == (toy.CLASSES,)
    assert (np.abs(initial_bias) <= features**-0.5).all()
    assert (np.abs(initial_bias) > 0.02 * features**-0.5).any() == drawn
    state, _ = toy.train(simulated, (0, 1))
    np.testing.assert_array_equal(state.servers.bias[0], initial_bias)


@pytest.mark.thorough
def test_the_sparse_etf_has_the_sparsity_and_the_norm_asked_for():
    setting = Setting(5, 16, 1, 1, 1, 1, False)
    server = FedLoGe(sparsity=0.2, ssec_norm=1.0).init_server(setting, {"params": {}}, None, jax.random.key(0))
    assert (server.sparse_etf == 0).sum() == 0.2 * 16 * 5
    np.testing.assert_allclose(np.linalg.norm(server.sparse_etf, axis=0), 1, rtol=0.1)


@pytest.mark.thorough
def test_fewer_features_than_classes_are_refused():
    with pytest.raises(UserError, match="FedLoGe has no ETF of 10 classes in 4 features"):
        FedLoGe().configure(Setting(10, 4, 5, 1, 1, 4, False), None)


def test_a_frozen_bias_needs_a_last_layer_that_has_one():
    variables = {"params": {"head": {"kernel": jnp.zeros((5, 3))}}}
    setting = Setting(3, 5, 1, 1, 1, 1, False)
    with pytest.raises(UserError, match="ssec_bias=frozen needs a model whose last layer has a bias"):
        FedLoGe(ssec_bias="frozen").init_server(setting, variables, None, jax.random.key(0))
    assert FedLoGe().init_server(setting, variables, None, jax.random.key(0)).bias.shape == (3,)
