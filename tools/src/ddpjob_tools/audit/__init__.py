"""Run any script undisturbed, then killed and started again; find the first step that differs.

`ddpjob-trainer audit`: command -> experiment -> runs, which start `probe` in each training process.
What that writes there records reads, judge compares (order: the samples), cures and report say.
workspace copies the folder for each run. Only probe imports torch.
"""
