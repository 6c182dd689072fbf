"""transformers' Trainer with a model of one's own, resumed from its last checkpoint."""

import toy
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

checkpoints = toy.OUT / "checkpoints"


class Begin(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        toy.begun(state.global_step)


callbacks = [Begin()]
# (the adapter)
trainer = Trainer(
    model=toy.Line(),
    args=TrainingArguments(
        output_dir=str(checkpoints), max_steps=toy.STEPS, per_device_train_batch_size=toy.BATCH,
        save_steps=toy.EVERY, logging_steps=1, use_cpu=True, ddp_backend="gloo",
        report_to="none", remove_unused_columns=False,
    ),
    train_dataset=toy.Toy(),
    callbacks=callbacks,
)  # fmt: skip
last = get_last_checkpoint(str(checkpoints)) if checkpoints.exists() else None
trainer.train(resume_from_checkpoint=last)
toy.ended(trainer.state.global_step, trainer.model)
