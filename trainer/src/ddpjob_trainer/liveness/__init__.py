"""Write the ranks' signs of life (heartbeat, watchdog), and judge their absence (hang).

The training process and the launcher share it. Never imports torch.
"""
