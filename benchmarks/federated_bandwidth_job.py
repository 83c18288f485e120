"""One variant of ``federated_bandwidth`` as a real job: MNIST's images that the workers hold as "mnist-SEED".

atoll submit benchmarks/federated_bandwidth_job.py --set STRATEGY=opwa --set UPLINK=bcrs
"""

from __future__ import annotations

import torch

from atoll import Federated, Job, Optimizer, OptimizerName, Registered, TrainingSpec
from benchmarks.federated_mnist import NETS, Plain, Setting, digits

SEED = 0
ROUNDS = 40
NET = "2nn"
STRATEGY = "fedavg"
UPLINK = "off"
DOWNLINK = "off"
ERROR_FEEDBACK = False
GAMMA = 5.0  # OPWA's
CLIENTS = 10


def job() -> Job:
    """What the lab's clients train."""
    setting = Setting(clients=CLIENTS, chosen=CLIENTS, rounds=ROUNDS)
    data = digits(setting, SEED)
    torch.manual_seed(SEED)
    net = NETS[NET]()
    return Job(
        module=Plain(net),
        example_inputs={"x": data.test_x[: setting.batch], "y": data.test_y[: setting.batch]},
        data=Registered(f"mnist-{SEED}", {"x": "x", "y": "y"}, held_out={"x": data.test_x, "y": data.test_y}),
        training=TrainingSpec(
            steps=ROUNDS,
            n_micro=1,
            seed=SEED,
            optimizer=Optimizer(OptimizerName.SGD, lr=setting.lr, momentum=setting.momentum),
            eval_every=1,
            eval_batches=setting.test_images // setting.batch,
        ),
        federated=Federated(
            STRATEGY,
            {"gamma": GAMMA} if STRATEGY == "opwa" else {},
            local_epochs=setting.epochs,
            min_clients=CLIENTS,
            held_out=0.0,
            evaluate_every=0,
            uplink=UPLINK,
            downlink=DOWNLINK,
            error_feedback=ERROR_FEEDBACK,
        ),
        metrics=("accuracy",),
        name="digits",
    )
