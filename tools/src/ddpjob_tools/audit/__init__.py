"""Run any script undisturbed, then killed and started again; find the first step that differs.

`ddpjob-trainer audit`: command -> experiment -> runs, which start probe in each training process.
probe -> recorder -> fingerprint write a line per optimizer step, records reads them, judge compares
(order: the samples), cures and report say it. Only probe, recorder and fingerprint import torch.
"""
