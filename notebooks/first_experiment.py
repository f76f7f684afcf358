# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first experiment
#
# Load data, divide them among clients so that every client lacks some classes, train three methods and compare them.
# Nothing is downloaded, and nothing is written to disk.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

import fedjax_pcdd as fp


def keep(figure, name):
    """Save a picture to the folder that the environment variable FIGURES names, if it is set."""
    if folder := os.environ.get("FIGURES"):
        figure.savefig(f"{folder}/{name}.png", dpi=100)


# %% [markdown]
# ## Load
#
# Scikit-learn's handwritten digits, 8x8 pixels, are built in. `fp.load_dataset` also reads prepared TensorFlow
# Datasets and npz files, and `fp.from_arrays` takes arrays.

# %%
digits = fp.load_dataset("digits")
print(digits)
figure, panels = plt.subplots(1, 10, figsize=(7, 1.0))
for c, ax in enumerate(panels):
    ax.imshow(digits.x_train[digits.y_train == c][0, ..., 0], cmap="gray_r")
    ax.set_axis_off()

# %% [markdown]
# ## Partition
#
# There are ten clients. Each class is divided among them in proportions drawn from a Dirichlet distribution with
# concentration $\beta = 0.1$, so most clients end up with a few classes, in very different amounts.

# %%
federation = fp.partition(digits, "dirichlet", clients=10, beta=0.1, seed=0)
federation.plot()

counts = federation.class_counts  # [K, C]
print("classes of each client:", (counts > 0).sum(1))
assert counts.sum() == len(digits.y_train)
assert ((counts > 0).sum(1) < 10).all()  # no client has all classes: partially class-disjoint data
assert federation.sizes.min() >= 10

# %% [markdown]
# ## Train
#
# A method is an object whose fields are its hyper-parameters. `fp.simulate` trains all clients as one compiled program
# and returns a history. GA is the accuracy of the global model on the whole test set. PA is the mean over clients of
# the accuracy of the model that the client has just trained, on a test set that follows the client's own distribution.

# %%
settings = {"rounds": 25, "local_epochs": 5, "batch_size": 32, "lr": 0.05, "seed": 0, "lanes": 1, "fine_tune_epochs": 0}
methods = {"FedAvg": fp.FedAvg(), "FedMR": fp.FedMR(mu1=0.01, mu2=1e-4), "FedGELA": fp.FedGELA(ew=4.0)}
histories = [fp.simulate(federation, method, label=name, **settings) for name, method in methods.items()]

# %% [markdown]
# ## Look

# %%
keep(fp.plot(histories), "first_experiment")
for row in fp.table(histories):
    print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value:8s}" for key, value in row.items()))

for history in histories:
    assert history.ga.shape == (25,)
    assert history.ga[-5:].mean() > 0.6
    assert history.pa[-5:].mean() > history.ga[-5:].mean()  # a client's own classes are easier than all classes

# %% [markdown]
# One seed says little: at this size GA changes by several points from round to round, and by 5 to 10 between seeds. To
# make the same comparison over several seeds, with intervals, use `experiments/sweep.py` and `experiments/compare.py`.
#
# Which classes suffer? Here is the accuracy on each class in the last round, beside the number of clients that have it:

# %%
owners = (counts > 0).sum(0)
print("class   ", " ".join(f"{c:5d}" for c in range(10)))
print("clients ", " ".join(f"{n:5d}" for n in owners))
for history in histories:
    print(f"{history.label:8s}", " ".join(f"{a:5.2f}" for a in history.ga_per_class[-1]))

assert histories[0].ga_per_class.shape == (25, 10)
assert histories[0].pa_per_client.shape == (25, 10)
total = np.bincount(digits.y_test)
np.testing.assert_allclose(histories[0].ga_per_class[-1] @ total / total.sum(), histories[0].ga[-1])

# %% [markdown]
# ## Go on from here
#
# `history.to_table()` has one row a round, ready for pandas. `history.variables` are the weights of the global model.
# `history.outputs(images)` returns its features and logits, and `history.outputs(images, client=3)` those of a client's
# model.

# %%
features, logits = histories[0].outputs(digits.x_test)
print("features", features.shape, "logits", logits.shape)
np.testing.assert_allclose(np.mean(np.argmax(logits, 1) == digits.y_test), histories[0].ga[-1])
print(histories[0].to_table()[-1])
