"""On-policy distillation as a custom stage: a teacher grades every sampled token of the student.

python train.py recipes/own_data_one_card.yaml "--stages=[recipes/opd.py:OPD]" --model.path=STUDENT \
    --reference.path=TEACHER --data.train_file=rows.jsonl --data.eval_file=eval.jsonl \
    --opd.micro_batch_size=1 --opd.learning_rate=1e-5

The teacher is the reference model, with the student's model family and vocabulary. A 7B teacher needs 17 GB in
bfloat16. The student trains as in GRPO, here with LoRA; section `opd` has the options of `grpo`. Rewards are only
logged. Method: docs/papers/opd.md.
"""

from dataclasses import replace

from minivlmrl.errors import UserError
from minivlmrl.trainers.grpo import GRPOTrainer


class OPD(GRPOTrainer):
    stage = "opd"
    needs_all_samples = True  # groups with equal rewards also have a gradient

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.reference.path is None:
            raise UserError("the stage opd needs a teacher; set reference.path to its folder")

    @staticmethod
    def has_reference(options) -> bool:
        return True

    def loss(self, batch):
        advantages = batch.ref_per_token_logps - batch.sampler_logps  # (R, T)
        loss, metrics = super().loss(replace(batch, advantages=advantages))
        kl = -(advantages * batch.loss_mask).sum() / batch.loss_mask.sum().clamp(min=1)
        return loss, metrics | {"teacher_kl": kl}
