"""What tells about models and runs: scores, curves, pictures. Import its modules one by one; a module needs a toolbox
only where its text says so."""
