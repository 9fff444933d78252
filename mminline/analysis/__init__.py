"""Looking at models and runs: their cost, scores, curves and pictures. Modules are imported one by one."""
