"""One run of the emitted train.py on a CPU: what OLMo-core does not do there is put in its place.

    python olmo_on_cpu.py PACKAGE WEIGHTS RESULT ARM --save-folder ... --train-single ...

Tokens go to their experts by plain torch, for OLMo-core's triton kernels need a GPU. Everything else is OLMo-core's:
configs, data, router, losses, optimiser, schedule, balancing.
"""

import importlib
import sys
import warnings

import torch

warnings.filterwarnings("ignore")


def dispatched(self, x, expert_weights, expert_indices, batch_size_per_expert):
    """`ParallelDroplessMLP.forward`: rows sorted by expert, weighted and added up."""
    rows, k = x.reshape(-1, x.shape[-1]), expert_indices.shape[-1]
    order = expert_indices.flatten().argsort(stable=True)
    out = self.mlp(rows[order // k], batch_size_per_expert) * expert_weights.flatten()[order, None]
    return torch.zeros_like(rows).index_add(0, order // k, out).view_as(x)


def main(package: str, weights: str, result: str) -> None:
    """Train, and keep what was seen and what came out."""
    from olmo_core.nn.moe.parallel_mlp import ParallelDroplessMLP
    from olmo_core.train.train_module import TransformerTrainModule

    ParallelDroplessMLP.forward = dispatched
    batches, losses, rates, trained = [], [], [], {}
    init, batch_of = TransformerTrainModule.__init__, TransformerTrainModule.train_batch
    told, step_of = TransformerTrainModule.record_ce_loss, TransformerTrainModule.optim_step

    def start(self, *arguments, **keywords):
        init(self, *arguments, **keywords)
        self.model.load_state_dict(torch.load(weights))
        trained["model"] = self.model

    def seen(self, batch, dry_run=False):
        if not dry_run:
            batches.append(batch["input_ids"].clone())
        batch_of(self, batch, dry_run=dry_run)

    def kept(self, value, *arguments, **keywords):
        losses.append(float(value))
        told(self, value, *arguments, **keywords)

    def stepped(self):
        step_of(self)
        rates.append({float(group["lr"]) for group in self.optim.param_groups})

    TransformerTrainModule.__init__ = start
    TransformerTrainModule.optim_step = stepped
    TransformerTrainModule.train_batch = seen
    TransformerTrainModule.record_ce_loss = kept
    module = importlib.import_module(f"{package}.train")
    parser = module.get_cli_parser()
    parser.add_argument("arm", choices=("baseline", "twin"))
    module.main(module.read, parser)
    torch.save({"batches": batches, "losses": losses, "rates": rates, "after": trained["model"].state_dict()}, result)


if __name__ == "__main__":
    package, weights, result = sys.argv[1:4]
    sys.argv = [sys.argv[0], *sys.argv[4:]]
    main(package, weights, result)
