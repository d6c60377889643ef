"""The test of a GPU host: see the file ``run`` beside this one."""
