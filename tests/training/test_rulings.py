"""What docs/ambiguities.md rules for the papers' tables: presets follow it, and docstrings cite the equations."""

import inspect

import numpy as np
import pytest
import yaml

from fedjax_pcdd.analysis import pictures
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fccl import FCCL
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.presets import PAPERS


def cell(table, split, method=None, **overrides):
    """Configuration and method of a cell."""
    options = {"preset": table, "split": split, **({"method": method} if method else {}), **overrides}
    return configure(options, PAPERS / "presets")


def splits_of(table):
    """The splits of a preset."""
    return names_in(table, "splits")


def names_in(table, section):
    """The splits, methods or variants of a preset."""
    return list(yaml.safe_load((PAPERS / f"presets/{table}.yaml").read_text())[section])


def clip(config, method):
    """The norm at which gradients are clipped, None for none."""
    return method.traits().clip if config.grad_clip == "method" else config.grad_clip


@pytest.mark.parametrize("table", ["table1", "table2", "table4", "table7", "table8", "table9", "table10"])
def test_feddc_and_feddyn_have_the_settings_that_train_with_momentum(table):  # E2, E5
    split = splits_of(f"fedmr/{table}")[0]
    _, feddc = cell(f"fedmr/{table}", split, "feddc")
    _, feddyn = cell(f"fedmr/{table}", split, "feddyn")
    assert (feddc.step_normaliser, feddc.server_step, feddyn.server_step) == ("a_k", "none", "none")
    assert feddc.traits().clip == feddyn.traits().clip == METHODS["scaffold"]().traits().clip == 10


def test_the_rows_of_fccls_table_3_are_as_ruled():  # E3
    config, fedavg = cell("fccl/table3", "office-home", variant="fedavg")
    assert (fedavg.collaborate, fedavg.continual, fedavg.traits().averages) == (False, False, "exchanged")
    assert config.pretrain_epochs is None  # the task's 50
    assert cell("fccl/table3", "office-home", "fedavg")[1].traits().global_model  # the present row, which is ours


def test_fedrod_and_fedgela_share_one_protocol_of_pa():  # E4
    assert METHODS["fedrod"]().traits().protocol is METHODS["fedgela"]().traits().protocol is None
    rules = {name: cell("fedgela/table2", "full-dir0.1", name)[0].pa_protocol for name in ("fedrod", "fedgela")}
    assert set(rules.values()) == {"best_epoch"}


def test_fedgelas_baselines_have_the_ruled_weights_and_epochs():  # E6, E7
    _, fedgen = cell("fedgela/table2", "full-dir0.1", "fedgen")
    _, fedrep = cell("fedgela/table2", "full-dir0.1", "fedrep")
    assert (fedgen.alpha, fedgen.beta_kl) == (METHODS["fedgen"]().alpha, METHODS["fedgen"]().beta_kl) == (1, 1)
    assert (fedrep.head_epochs, fedrep.body_epochs) == (9, 1)


@pytest.mark.parametrize("table", ["table2", "table3"])
def test_fedreps_head_has_the_epochs_that_its_body_leaves(table):  # E7: max(1, E - 1) and 1
    config, fedrep = cell(f"fedgela/{table}", splits_of(f"fedgela/{table}")[0], "fedrep")
    assert (fedrep.head_epochs, fedrep.body_epochs) == (max(1, config.local_epochs - 1), 1)


def test_fedrls_distance_is_over_the_batch_in_its_tables():  # E8
    assert cell("fedrl/table1", "mnist-dir0.5", "fedrl")[1].distance == "batch_norm"
    assert METHODS["fedrl"]().distance == "per_sample"
    assert cell("fedrl/table1", "mnist-dir0.5", "scaffold")[0].grad_clip == "none"  # E2.5


def test_in_fedmrs_table_15_the_iid_split_alone_has_the_neck_of_table_1():  # E9
    iid, table1 = cell("fedmr/table15", "full-iid", "fedmr")[0], cell("fedmr/table1", "svhn-IID", "fedmr")[0]
    fields = ("neck", "batch_size", "weight_decay", "grad_clip", "rounds", "dataset", "model", "partition")
    assert [getattr(iid, name) for name in fields] == [getattr(table1, name) for name in fields]
    assert cell("fedmr/table15", "full-dir0.1", "fedmr")[0].neck == 2


@pytest.mark.parametrize("split", [split for split in splits_of("fedmr/table15") if split != "full-iid"])
def test_fedmrs_table_15_trains_as_fedgelas_tables(split):
    table15, table2 = cell("fedmr/table15", split, "fedavg")[0], cell("fedgela/table2", f"svhn-{split}", "fedavg")[0]
    # Table 15 has no PA, and SVHN no augmentation.
    fields = [name for name in table15.__dataclass_fields__ if name not in {"pa_protocol", "augment"}]
    assert [getattr(table15, name) for name in fields] == [getattr(table2, name) for name in fields]


@pytest.mark.parametrize("method", names_in("fedmr/shakespeare", "methods"))
def test_shakespeares_low_rate_is_trained_with_the_other_tables_optimiser(method):
    shakespeare, table1 = cell("fedmr/shakespeare", "lr0.01-natural", method), cell("fedmr/table1", "P10C2", method)
    fields = ("optimizer", "lr", "momentum", "weight_decay")
    assert [getattr(shakespeare[0], name) for name in fields] == [getattr(table1[0], name) for name in fields]
    assert clip(*shakespeare) == clip(*table1)


@pytest.mark.parametrize("table", ["table2", "table3", "table4", "table5", "table6", "energy"])
def test_all_methods_of_fedgelas_tables_are_clipped(table):  # E10, E16.4
    config, _ = cell(f"fedgela/{table}", splits_of(f"fedgela/{table}")[0], "fedavg")
    assert (config.grad_clip, config.neck) == (20, 2)


def test_docstrings_cite_the_papers_equations():  # E12
    assert "equation 2" in (inspect.getdoc(FCCL.public_loss) or "")
    assert "equations 4 and 5" in (inspect.getdoc(FCCL.penalty) or "")
    assert "(equation 1)" in inspect.getsource(pictures)


def test_the_readings_of_the_energy_are_variants_in_their_order():  # E13
    variants = yaml.safe_load((PAPERS / "presets/fedgela/energy.yaml").read_text())["variants"]
    assert [name[0] for name in variants] == sorted(name[0] for name in variants)
    methods = [cell("fedgela/energy", splits_of("fedgela/energy")[0], variant=name)[1] for name in list(variants)[:5]]
    assert [(method.normalise, method.scale, method.ew) for method in methods] == [
        ("l2", "linear", 1e5), ("batch", "linear", 1e5), ("l2", "sqrt", 1e4), ("batch", "linear", 5),
        ("l2", "linear", 5),
    ]  # fmt: skip


@pytest.mark.parametrize(("clients", "classes", "ratio"), [(10, 2, 2.6), (10, 3, 2.1), (10, 5, 1.4), (5, 2, 1.0)])
def test_sizes_of_fedmrs_clients_differ_by_the_ruled_ratio(clients, classes, ratio):  # E16.8
    y, ratios = np.repeat(np.arange(10), 600), []
    for seed in range(60):
        options = {"num_classes": 10, "clients": clients, "classes_per_client": classes, "seed": seed}
        sizes = [len(indices) for indices in partition("pcdd", y, y[:10], **options).train]
        ratios.append(max(sizes) / min(sizes))
    assert np.median(ratios) == pytest.approx(ratio, abs=0.4 if ratio > 1 else 0.01)
