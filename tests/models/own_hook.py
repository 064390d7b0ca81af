# SPDX-License-Identifier: Apache-2.0
"""A hook: code that is called at named places of the loop (docs/extending.md).

python pretrain_gpt.py ... --hooks tests.models.own_hook:BestValidation
"""

from megatron.training.hooks import Hook


class BestValidation(Hook):
    """Tells at the end which validation had the lowest loss."""

    best = None

    def after_evaluation(self, run, evaluation):
        found = (evaluation.losses["lm loss"], run.iteration)
        if evaluation.split == "validation" and (self.best is None or found < self.best):
            self.best = found

    def end(self, run):
        if run.rank == 0 and self.best:
            print("best validation: {:.4f} at iteration {}".format(*self.best))
