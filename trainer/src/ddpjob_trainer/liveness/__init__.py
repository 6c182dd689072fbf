"""Signs of life: a rank writes them (heartbeat, watchdog), hang says what their absence means.

Shared by the training process and the launcher. Never imports torch.
"""
