"""`check_method` passes a method that fulfils the contract, and names the claim that a method breaks."""

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from fedjax_pcdd import testing
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS, Message, Method
from fedjax_pcdd.methods.method import Summary
from fedjax_pcdd.testing import check_method


@struct.dataclass
class Dividing(Method):
    """Divides by class counts, of which some are 0."""

    def penalty(self, variables, outputs, batch, context):
        return 1e-3 * jnp.sum(outputs.logits.mean(0) / context.facts.class_counts)


@struct.dataclass
class Scaling(Method):
    """FedAvg with the message scaled by 1.01."""

    def init_client(self, setting, server, facts, key):
        return jnp.zeros(())

    def upload(self, variables, summary, context):
        return context.client + context.facts.client, Message(mean=jax.tree.map(lambda x: x * 1.01, variables))


@struct.dataclass
class CountsPadding(Method):
    """A penalty whose mean is over the padding too."""

    def penalty(self, variables, outputs, batch, context):
        return jnp.mean(outputs.features**2)


@struct.dataclass
class SumsPadding(Method):
    """Its summary is a sum over the padding too."""

    def traits(self):
        return super().traits()._replace(summary=Summary())

    def summarise(self, variables, batch, context):
        return (batch.images**2).sum()

    def upload(self, variables, summary, context):
        client, message = super().upload(variables, summary, context)
        return client, message._replace(mean=jax.tree.map(lambda x: x * (1 + 1e-3 * summary), message.mean))


@struct.dataclass
class Misspelt(Method):
    """FedAvg, since its penalty has no hook's name."""

    def penality(self, variables, outputs, batch, context):
        return jnp.sum(outputs.features)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "claim"),
    [(CountsPadding, testing.padding_does_not_change_results),
     (SumsPadding, testing.batches_of_summarise_do_not_change_results)],
)  # fmt: skip
def test_a_method_that_counts_padding_is_named_with_the_claim_it_breaks(monkeypatch, method, claim):
    monkeypatch.setattr(testing, "CLAIMS", (claim,))
    with pytest.raises(AssertionError, match=f"{method.__name__}: {claim.__name__.replace('_', ' ')}"):
        check_method(method)
    check_method(Method)


def test_a_function_named_almost_like_a_hook_fails_the_check():
    with pytest.raises(AssertionError, match=r"Misspelt\.penality is not a hook: did you mean penalty\?"):
        check_method(Misspelt)


@pytest.mark.thorough
def test_a_method_that_fulfils_the_contract_passes():
    check_method(METHODS["scaffold"])


@pytest.mark.thorough
def test_a_method_that_reduces_to_fedavg_passes():
    check_method(METHODS["fedprox"], as_fedavg={"mu": 0.0}, mu=0.1)


@pytest.mark.thorough
def test_a_method_that_weighs_otherwise_is_compared_with_fedavg_of_its_weights(monkeypatch):
    monkeypatch.setattr(testing, "CLAIMS", ())
    check_method(METHODS["feddyn"], as_fedavg={"alpha": 0.0})  # weighs all clients alike


def test_rounding_alone_does_not_fail_a_method(monkeypatch):
    def claim(make):
        bias = testing.train(make(), (0,))[0].servers.variables["params"]["head"]["bias"]
        lost = abs((bias + 1e3) - 1e3 - bias).max()
        assert lost < 1e-9, "rounding"

    monkeypatch.setattr(testing, "CLAIMS", (claim,))
    with pytest.raises(AssertionError, match="Method: claim: rounding"):
        check_method(Method)
    monkeypatch.setattr(testing, "ROUNDED", (claim,))
    check_method(Method)


@pytest.mark.thorough
def test_a_method_with_nans_is_named_with_the_claim_it_breaks():
    with pytest.raises(AssertionError, match=r"Dividing: (?:a ragged federation gives no nan|lanes do not change)"):
        check_method(Dividing)


@pytest.mark.thorough
def test_a_method_that_does_not_reduce_to_fedavg_fails():
    with pytest.raises(AssertionError, match=r"Scaling: reduces to fedavg: [\s\S]*Not equal to tolerance"):
        check_method(Scaling, as_fedavg={})


def test_methods_that_exchange_logits_are_refused():
    with pytest.raises(UserError, match="FCCL exchanges logits"):
        check_method(METHODS["fccl"])
