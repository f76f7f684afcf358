"""`check_method` passes a method that fulfils the contract, and names the claim that a method breaks."""

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from fedjax_pcdd import testing
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS, Message, Method
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


@pytest.mark.thorough
def test_a_method_that_fulfils_the_contract_passes():
    check_method(METHODS["scaffold"])


@pytest.mark.thorough
def test_a_method_that_reduces_to_fedavg_passes():
    check_method(METHODS["fedprox"], as_fedavg={"mu": 0.0}, mu=0.1)


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
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_method(Scaling, as_fedavg={})


def test_methods_that_exchange_logits_are_refused():
    with pytest.raises(UserError, match="FCCL exchanges logits"):
        check_method(METHODS["fccl"])
