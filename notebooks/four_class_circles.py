# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Collapse, invasion and reshaping, seen on a sphere
#
# This is the example of FedMR's appendix B (Fan et al., TMLR 2023), trained live. Four classes lie in discs of radius
# $\tfrac12$ around $(\pm1, \pm1)$. A small network (2 inputs, 128 hidden units with ReLU, 3 features, 4 logits) has
# features of only three numbers, so we can look at them. It is trained
#
# 1. on all four classes,
# 2. on two of them, as on a client with partially class-disjoint data,
# 3. on the same two with FedMR: $L = \mathrm{CE} + \mu_1 L_{intra} + \mu_2 L_{inter}$.
#
# The paper claims that the second model **collapses** (the features of a class use fewer dimensions) and **invades**
# (the two classes take the space of the missing ones), and that FedMR **reshapes** it. We measure each of these.

# %%
import os
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd.analysis.angles import pairwise_angles
from fedjax_pcdd.models.mlp import MLP

CENTRES = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
COLOURS = np.array(["#0072B2", "#D55E00", "#009E73", "#CC79A7"])
REACH = 1.6  # points lie in [-REACH, REACH]^2


def keep(figure, name):
    """Save a picture to the folder that the environment variable FIGURES names, if it is set."""
    if folder := os.environ.get("FIGURES"):
        figure.savefig(f"{folder}/{name}.png", dpi=100)


# %% [markdown]
# ## Data and model
#
# The points are stored as images of two pixels in $[0, 1]$, and a `Pipeline` of our own maps them back to
# $[-1.6, 1.6]^2$.


# %%
def points(per_class, seed):
    """Points [4 * per_class, 2], uniform in the discs and scaled to [0, 1], and their classes."""
    random = np.random.default_rng(seed)
    angle, share = random.uniform(0, 2 * np.pi, (4, per_class)), random.uniform(0, 1, (4, per_class))
    offsets = 0.5 * np.sqrt(share)[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    places = CENTRES[:, None] + offsets
    return places.reshape(-1, 2) / (2 * REACH) + 0.5, np.repeat(np.arange(4), per_class)


data = fp.from_arrays(*points(5000, seed=0), *points(500, seed=1), name="circles", num_classes=4)
model = fp.build_model("mlp", data).clone(backbone=MLP((128,)), neck=1, neck_width=3)
OPTIONS: dict[str, Any] = {
    "model": model, "pipeline": fp.Pipeline(mean=(0.5,), std=(0.5 / REACH,)),
    "batch_size": 128, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "lanes": 1, "fine_tune_epochs": 0, "seed": 0,
}  # fmt: skip


def alone(classes, method, label):
    """Train one client that has some of the classes for 50 epochs; the test set has all classes."""
    owned = np.flatnonzero(np.isin(data.y_train, classes))
    federation = fp.Federation(data, fp.Partition((owned,), (np.arange(len(data.y_test)),)))
    return fp.simulate(federation, method, rounds=1, local_epochs=50, label=label, **OPTIONS)


# %% [markdown]
# FedMR's inter-class term needs prototypes, the mean features of the classes. As in the paper's picture, those of the
# missing classes come from the four-class model, and a method of our own starts with them. FedMR's weights $\mu_1$ and
# $\mu_2$ are not stated there; $\mu_1 = 0.01$ suits features of few dimensions.


# %%
@struct.dataclass
class Prepared(fp.FedMR):
    """FedMR that has its prototypes [C, D] from the first round on."""

    prototypes: Any = fp.hyperparameter(None, help="[C, D] mean features of a model that knows all classes")

    def init_server(self, setting, variables, class_counts, key):
        """FedMR's server with the given prototypes, all of them valid."""
        server = super().init_server(setting, variables, class_counts, key)
        return server._replace(prototypes=self.prototypes, valid=jnp.ones(setting.num_classes, bool))


four = alone([0, 1, 2, 3], fp.FedAvg(), "four classes")
two = alone([0, 1], fp.FedAvg(), "two classes")

known = np.asarray(four.outputs(data.x_train).features)
prototypes = jnp.asarray(np.stack([known[data.y_train == c].mean(0) for c in range(4)]))
reshaped = alone([0, 1], Prepared(mu1=0.01, mu2=0.1, negatives="all", prototypes=prototypes), "two classes, FedMR")
models = [four, two, reshaped]

assert four.ga[-1] > 0.99
assert (two.ga_per_class[-1][:2] > 0.99).all()
assert (reshaped.ga_per_class[-1][:2] > 0.99).all()

# %% [markdown]
# ## What we measure
#
# For each class we measure the following on test points, including those of the missing classes, which the second and
# third models have never seen:
#
# - **share**: the share of the variance of its features that lies in the first of three directions. Near 1 means a
#   line.
# - **weakest**: the smallest eigenvalue of the features' correlation matrix. 1 means no correlation at all, 0 a plane
#   or less.
# - **spread**: the mean angle between a feature and the mean direction of its class.
# - **distance**: the angle between the mean direction of a missing class and the nearest mean direction of a class that
#   was trained on.
# - **sphere**: the share of all directions that the head assigns to the class.


# %%
def measure(history):
    """The quantities above, each [4] except `angles` [4, 4]."""
    features = np.asarray(history.outputs(data.x_test).features, float)
    groups = [features[data.y_test == c] for c in range(4)]
    units = [g / np.linalg.norm(g, axis=1, keepdims=True) for g in groups]
    directions = np.stack([u.mean(0) / np.linalg.norm(u.mean(0)) for u in units])
    spectra = np.stack([np.linalg.eigvalsh(np.cov(g.T)) for g in groups])
    everywhere = np.random.default_rng(2).normal(size=(20_000, 3))
    everywhere *= np.linalg.norm(features, axis=1).mean() / np.linalg.norm(everywhere, axis=1, keepdims=True)
    head = history.variables["params"]["head"]
    said = np.argmax(everywhere @ np.asarray(head["kernel"]) + np.asarray(head["bias"]), 1)
    return {
        "share": spectra[:, -1] / spectra.sum(1),
        "weakest": np.array([np.linalg.eigvalsh(np.corrcoef(g.T))[0] for g in groups]),
        "spread": np.array([
            np.degrees(np.arccos(np.clip(u @ m, -1, 1))).mean() for u, m in zip(units, directions, strict=True)
        ]),
        "sphere": np.bincount(said, minlength=4) / len(said),
        "angles": np.asarray(pairwise_angles(jnp.asarray(directions))),
        "units": units,
    }  # fmt: skip


found = [measure(history) for history in models]
for history, values in zip(models, found, strict=True):
    print(history.label)
    for name in ("share", "weakest", "spread", "sphere"):
        print(f"  {name:8s}", "  ".join(f"{v:7.3f}" for v in values[name]))
    print("  distance of classes 2, 3 from the nearest of 0, 1:", values["angles"][2:, :2].min(1).round(1))

# %% [markdown]
# ## Collapse
#
# The features of the two classes are stretched along one direction, whose share of the variance rises. They also lie in
# a plane, as the weakest eigenvalue shows. But so do those of the four-class model: the inputs have two dimensions, and
# plain training finds no use for a third one. **The missing classes cause the stretching, not the plane.**

# %%
of_four, of_two, of_reshaped = found
assert of_two["share"][:2].min() > 0.75
assert of_two["share"][:2].mean() > of_four["share"][:2].mean() + 0.1
assert of_two["weakest"][:2].max() < 0.05
assert of_four["weakest"].max() < 0.15

# %% [markdown]
# ## Invasion
#
# The four-class head gives every class about a quarter of the sphere. In the two-class model the existing classes have
# three quarters of it instead of half, and points of the missing classes land **on top of them**, a few degrees from
# their mean direction. Whatever the server averages into this model, these features do not tell class 2 from class 0,
# or class 3 from class 1.

# %%
assert of_four["sphere"].min() > 0.1
assert of_four["sphere"][:2].sum() < 0.6
assert of_two["sphere"][:2].sum() > 0.65
invaded = of_two["angles"][2:, :2].min(1)
assert invaded.max() < 20

# %% [markdown]
# ## Reshaping
#
# With FedMR the features of the trained classes use all three dimensions with almost no correlation, and those of
# classes that were never seen stay clear of the trained ones. The head still gives most of the sphere to the trained
# classes, since no sample required anything else: what is reshaped is the feature space, not the classifier.

# %%
assert of_reshaped["weakest"][:2].min() > 0.7
freed = of_reshaped["angles"][2:, :2].min(1)
assert (freed > 1.5 * invaded).all()
assert freed.min() > 25
assert of_reshaped["sphere"][:2].sum() > 0.65

# %% [markdown]
# **Which term does it?** In this example it is the intra-class term alone. The hinge of the inter-class term is
# inactive almost from the beginning, because every point is nearer to its own prototype than to any other.

# %%
intra = alone([0, 1], Prepared(mu1=0.01, terms="intra", prototypes=prototypes), "intra only")
inter = alone([0, 1], Prepared(mu2=0.1, terms="inter", negatives="all", prototypes=prototypes), "inter only")
of_intra, of_inter = measure(intra), measure(inter)
for label, values in (("intra only", of_intra), ("inter only", of_inter)):
    print(f"{label}: weakest {values['weakest'][:2].round(3)}, distance {values['angles'][2:, :2].min(1).round(1)}")
assert of_intra["weakest"][:2].min() > 0.7
assert (of_intra["angles"][2:, :2].min(1) > invaded).all()
assert of_inter["weakest"][:2].max() < 0.1


# %%
def draw(ax, units, trained, title):
    """Draw unit features [n, 3] of each class on the sphere; crosses mark classes that were not trained on."""
    u, v = np.mgrid[0 : 2 * np.pi : 25j, 0 : np.pi : 13j]
    ax.plot_wireframe(np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v), color="0.85", lw=0.4)
    for c, group in enumerate(units):
        seen = c in trained
        label = f"class {c}" if seen else f"class {c} (cross: not trained on)"
        ax.scatter(
            *group[:200].T, s=9 if seen else 16, marker="o" if seen else "x", color=COLOURS[c], lw=0.8, label=label
        )
    ax.set_title(title, fontsize=10)
    ax.set_box_aspect((1, 1, 1), zoom=1.45)
    ax.set_axis_off()
    ax.view_init(elev=35, azim=60)


figure = plt.figure(figsize=(9.6, 3.5), layout="constrained")
titles = ("trained on four classes", "trained on two: invasion", "trained on two by FedMR")
for i, (title, values) in enumerate(zip(titles, found, strict=True)):
    ax = figure.add_subplot(1, 3, i + 1, projection="3d")
    draw(ax, values["units"], (0, 1, 2, 3) if i == 0 else (0, 1), title)
figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
keep(figure, "four_class_circles")

# %% [markdown]
# ## In a federation
#
# Two clients with two classes each are averaged after every epoch. Does FedMR help? **Not here**: the task is so easy
# that FedAvg also gets all points right within a few rounds, and a penalty only slows it down. The example shows a
# mechanism, not a gain.

# %%
federation = fp.partition(data, "pcdd", clients=2, classes_per_client=2)
rounds = [
    fp.simulate(federation, method, rounds=8, local_epochs=1, label=label, **OPTIONS)
    for method, label in ((fp.FedAvg(), "FedAvg"), (fp.FedMR(mu1=0.01, mu2=0.1, negatives="all"), "FedMR"))
]
for history in rounds:
    print(f"{history.label:8s} GA {history.ga.round(3)}")
    assert history.ga[-1] > 0.95
