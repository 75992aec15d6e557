"""The parts of `make test` that need more than one command."""
