"""A mistake in a user's own method is reported in one sentence that names the method, when it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Message, Method
from fedjax_pcdd.testing import leaves


@struct.dataclass
class Long(Method):
    def penalty(self, variables, outputs, batch, context):
        return outputs.features.mean(1)


@struct.dataclass
class LongTerm(Method):
    def regulariser(self, params, context):
        return jnp.ones(3)


@struct.dataclass
class Forgetful(Method):
    def init_client(self, setting, server, facts, key):
        return {"count": jnp.zeros(())}

    def upload(self, variables, summary, context):
        return {}, Message(mean=variables)


@struct.dataclass
class Headless(Method):
    def aggregate(self, server, message, weights, context):
        params = {"backbone": message.mean["params"]["backbone"]}
        return server._replace(variables={"params": params})


@struct.dataclass
class Partial(Method):
    def local_update(self, evaluate, step, variables, batch, context):
        loss, state, gradients = evaluate(variables)
        return loss, state, step({"head": gradients["head"]})


@struct.dataclass
class Growing(Method):
    def local_update(self, evaluate, step, variables, batch, context):
        loss, state, gradients = evaluate(variables)
        return loss, {**state, "seen": jnp.ones(2)}, step(gradients)


@struct.dataclass
class Wide(Method):
    def local_update(self, evaluate, step, variables, batch, context):
        loss, state, taken_step = super().local_update(evaluate, step, variables, batch, context)
        return loss, state, taken_step._replace(updates=jax.tree.map(lambda x: x[None], taken_step.updates))


@struct.dataclass
class Silent(Method):
    def upload(self, variables, summary, context):
        """Returns nothing."""


@struct.dataclass
class Swapped(Method):
    def upload(self, variables, summary, context):
        return Message(mean=variables), ()


@struct.dataclass
class Nothing(Method):
    def penalty(self, variables, outputs, batch, context):
        """Returns nothing."""


@struct.dataclass
class Unfinished(Method):
    def local_update(self, evaluate, step, variables, batch, context):
        return super().local_update(evaluate, step, variables, batch, context)[:2]


@struct.dataclass
class Halved(Method):
    def trainable(self, params, context):
        return {"head": True}


@struct.dataclass
class Counting(Method):
    def upload(self, variables, summary, context):
        client, message = super().upload(variables, summary, context)
        return client, message._replace(mean={"model": message.mean, "count": jnp.asarray(6)})


@struct.dataclass
class Halving(Method):
    def init_client(self, setting, server, facts, key):
        return {"count": jnp.zeros((), jnp.int32)}

    def upload(self, variables, summary, context):
        return {"count": context.client["count"] + 0.5}, super().upload(variables, summary, context)[1]


@struct.dataclass
class Half(Method):
    def trainable(self, params, context):
        return jax.tree.map(lambda x: 0.5, params)


@struct.dataclass
class Texting(Method):
    def upload(self, variables, summary, context):
        return (), Message(mean=variables, total={"note": "hello"})


@struct.dataclass
class Stateless(Method):
    def loss(self, variables, batch, context):
        return super().loss(variables, batch, context)[0], None


@struct.dataclass
class Standing(Method):
    def local_update(self, evaluate, step, variables, batch, context):
        loss, _, taken_step = super().local_update(evaluate, step, variables, batch, context)
        return loss, None, taken_step


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Stateless, r"Stateless\.loss must return a tuple \(anything, a Mapping\), not \(.*, NoneType\)\."),
        (Standing, r"Standing\.local_update must return a tuple \(anything, a Mapping, a Step\), not \(.*NoneType, "),
        (Half, r"Half\.trainable must say True or False of each array of the parameters; .* is 0\.5\."),
        (Texting, r"Texting\.upload must send numbers; .*\['note'\] is 'hello'\."),
        (Counting, r"Counting\.upload must send real numbers in the .* mean, .* \['count'\] is int32: convert it"),
        (Halving, r"Halving\.upload must return the client's next state .*; \['count'\] is float32, not int32\."),
        (Nothing, r"Nothing\.penalty must return a scalar, not NoneType"),
        (Unfinished, r"Unfinished\.local_update must return a tuple \(anything, a Mapping, a Step\), not"),
        (Halved, r"Halved\.trainable must say something of each array of the parameters, or return None\."),
        (Silent, r"Silent\.upload must return a tuple \(anything, a Message\), not NoneType\."),
        (Swapped, r"Swapped\.upload must return a tuple \(anything, a Message\), not \(Message, "),
        (Long, r"Long\.penalty must return a scalar, not an array of shape \[8\]: sum or average it\."),
        (LongTerm, r"LongTerm\.regulariser must return a scalar, not an array of shape \[3\]"),
        (Forgetful, r"Forgetful\.upload must return .* as init_client made it; \['count'\] is missing\."),
        (Headless, r"Headless\.aggregate must return .* as init_server made it; variables\['params'\]\['head'\]"),
        (Partial, r"Partial\.local_update must return the gradients of a step as the parameters are; \['backbone'\]"),
        (Growing, r"Growing\.local_update must return the variables as download gave them; \['seen'\] is too much"),
        (Wide, r"Wide\.local_update must return the updates .* has the shape \[1, .*\], not \["),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_hook_that_returns_the_wrong_type_or_shape_is_named(method, sentence):
    simulated = toy.simulation(method=method())
    with pytest.raises(UserError, match=sentence) as error:
        simulated.round.lower(*round_arguments(simulated))
    assert "\n" not in str(error.value)


@struct.dataclass
class Numbering(Method):
    def init_client(self, setting, server, facts, key):
        return {"rounds": 0}

    def upload(self, variables, summary, context):
        return {"rounds": 1}, Message({"model": variables, "one": 1.0}, total=2, each=3.0)

    def aggregate(self, server, message, weights, context):
        said = jnp.stack([message.mean["one"], message.total, *message.each])
        return server._replace(variables=jax.tree.map(lambda x: x + said.sum(), message.mean["model"]))


@pytest.mark.thorough
def test_messages_and_states_of_clients_may_be_numbers_of_python():
    simulated, plain = (toy.simulation(method=method) for method in (Numbering(), Method()))
    state, expected = (one.step(one.start(), 0)[0] for one in (simulated, plain))
    assert sorted(np.array(state.clients["rounds"])) == [0, 0, 1, 1, 1]
    for new, old in zip(leaves(state.servers), leaves(expected.servers), strict=True):
        np.testing.assert_allclose(new, old + 1 + 3 * 2 + 3 * 3, rtol=1e-6)


@struct.dataclass
class Bare(Method):
    def init_server(self, setting, variables, class_counts, key):
        return variables


@struct.dataclass
class Personless(Method):
    def init_server(self, setting, variables, class_counts, key):
        return {"model": variables}

    def download(self, server, client):
        return server["model"]

    def generic_variables(self, server):
        return server["model"]


@struct.dataclass
class Empty(Method):
    def download(self, server, client):
        return server.variables["params"]


@struct.dataclass
class Further(Method):
    def further_models(self, server):
        return {"other": server}


def test_a_server_without_variables_and_hooks_that_return_no_model_are_named():
    with pytest.raises(UserError, match=r"Bare\.init_server must return something with a field variables, which downl"):
        toy.simulation(method=Bare()).start()
    with pytest.raises(UserError, match=r"Personless\.init_server must .* a field variables, which personal_variables"):
        toy.simulation(method=Personless()).start()
    simulated = toy.simulation(method=Empty())
    with pytest.raises(UserError, match=r"Empty\.download must return variables of a model, with params, not a dict"):
        simulated.round.lower(*round_arguments(simulated))
    simulated = toy.simulation(method=Further())
    state = simulated.start()
    with pytest.raises(UserError, match=r"Further\.further_models must return variables of a model, .*, not Server"):
        simulated.evaluate(state)


@struct.dataclass
class Recording(Method):
    recorded: tuple = struct.field(pytree_node=False, default=())

    def traits(self):
        return super().traits()._replace(recorded=self.recorded)


@pytest.mark.parametrize("recorded", [("drift",), ("variables",)])
def test_what_is_recorded_must_be_a_scalar_of_the_server(recorded):
    with pytest.raises(UserError, match=r"'(drift|variables)' is recorded: give a tuple of scalar fields"):
        toy.simulation(method=Recording(recorded)).start()


@struct.dataclass
class Weighing(Method):
    weight_of_client_1: float = 1.0

    def weight(self, facts):
        return jnp.where(facts.client == 1, self.weight_of_client_1, 1.0)


@struct.dataclass
class WeighingClasses(Method):
    def weight(self, facts):
        return facts.class_counts


@struct.dataclass
class Choosing(Method):
    def weight(self, facts):
        return facts.num_samples > 10


def test_a_weight_may_be_a_boolean():
    np.testing.assert_allclose(
        toy.simulation(method=Choosing(), cohort=5).jobs(0)[0].weight, [0, 1 / 3, 0, 1 / 3, 1 / 3]
    )


@struct.dataclass
class Advised(Method):
    def configure(self, setting, hyper):
        """Returns nothing."""


@struct.dataclass
class Worded(Method):
    def init_client(self, setting, server, facts, key):
        return {"name": "a"}


@struct.dataclass
class Keyed(Method):
    def init_client(self, setting, server, facts, key):
        return {"key": key}


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Keyed(), "Keyed.init_client cannot keep a random key: keep jax.random.key_data(key)."),
        (Weighing(jnp.nan), "Weighing.weight must be finite and at least 0, not nan as for client 1."),
        (Weighing(-1.0), "Weighing.weight must be finite and at least 0, not -1.0 as for client 1."),
        (
            WeighingClasses(),
            "WeighingClasses.weight must return a scalar, not an array of shape [4]: sum or average it.",
        ),
        (Advised(), "Advised.configure must return a tuple (a Method, a list), not NoneType."),
        (Worded(), "Worded.init_client must return arrays, not str."),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_hook_that_is_called_before_training_is_checked_too(method, sentence):
    with pytest.raises(UserError) as error:
        toy.simulation(method=method).start()
    assert str(error.value) == sentence


@struct.dataclass
class Wider(Method):
    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        plain_logits = super().logits(model, variables, images, server, client, facts, scope=scope)
        return jnp.concatenate([plain_logits, plain_logits], 1)


def test_logits_with_a_wrong_number_of_classes_are_refused():
    simulated = toy.simulation(method=Wider())
    with pytest.raises(UserError, match=r"Wider\.logits must return an array of shape \[\d+, 4\], not \[\d+, 8\]\."):
        simulated.general(simulated.start())


def round_arguments(simulated):
    return simulated.arguments(simulated.start(), 0, simulated.plan(0))


@struct.dataclass
class Forgetful(Method):
    def aggregate(self, server, message, weights, context):
        server._replace(variables=message.mean)


def test_a_hook_without_return_is_said_to_return_none():
    simulated = toy.simulation(method=Forgetful())
    with pytest.raises(UserError, match=r"Forgetful\.aggregate must return the server's next state as .*, not None\."):
        simulated.round.lower(*round_arguments(simulated))


@struct.dataclass
class Described(Method):
    def traits(self):
        return "a paper"


def test_traits_of_the_wrong_type_are_refused():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    with pytest.raises(UserError, match=r"Described\.traits must return a Traits, not str\."):
        fp.simulate(federation, Described(), rounds=1)
